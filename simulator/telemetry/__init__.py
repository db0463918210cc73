"""Telemetry of the simulated engine: metrics pages, spans, per-request records, the truth."""
