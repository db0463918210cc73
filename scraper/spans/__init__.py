"""OTLP spans of engines and gateways: received, logged, forwarded, and read as requests."""
