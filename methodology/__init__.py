"""The benchmarking draft's tests and the statistics that they share, as pure functions."""
