"""A test of the draft as a study: its directory, its steps, and what is derived from them."""
