"""How a reply is read: its events, its text, its timings, and why it failed."""
