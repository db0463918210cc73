"""A test of the draft as a study: its directory, the steps that it runs, and what is derived from them."""
