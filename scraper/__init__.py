"""The server: what its endpoints said, and what those numbers mean."""
