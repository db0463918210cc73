"""The simulated engine: its scheduler, its KV cache and its step clock."""
