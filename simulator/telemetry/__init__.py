"""What the simulated engine exposes about itself: metrics pages, spans, per-request records, the truth."""
