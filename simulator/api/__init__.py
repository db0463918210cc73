"""The HTTP, WebSocket and gRPC interfaces of the simulated engine."""
