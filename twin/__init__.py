"""The twin: an engine's speed fitted to a run, and played under other loads and settings."""
