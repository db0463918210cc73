"""A run directory as tables: its manifest, events and logs, read while they grow or when they are whole."""
