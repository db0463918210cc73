"""Statistics that a single test of the draft needs."""
