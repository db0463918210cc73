"""What all processes agree on to write and read a run directory: frames, clock, missing values, columns, access."""
