"""A study: the steps that a test of the draft decides, what came of each, and what follows from all of them."""
