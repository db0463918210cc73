"""Commands' options: what they are, how they are checked, and their schema."""
