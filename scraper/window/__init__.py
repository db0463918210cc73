"""Contents of the measured window: increases, rates, statistics and their summary."""
