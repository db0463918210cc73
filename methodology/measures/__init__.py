"""Statistics that a single test of the draft needs: what its module under `procedures` makes results of."""
