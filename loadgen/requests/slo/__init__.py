"""Service level objectives: which requests meet them (goodput), and whether a run did."""
