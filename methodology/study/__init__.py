"""A study: the steps that a test of the draft decides, their outcomes, and the results."""
