"""Formats shared by all processes that use a run directory: frames, clock, missing values, columns, access."""
