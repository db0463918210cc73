"""What happened in the measured window: increases, rates, statistics and their summary."""
