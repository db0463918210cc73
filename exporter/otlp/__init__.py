"""A run's client spans, sent over OTLP."""
