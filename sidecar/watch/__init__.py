"""The resident sidecar: no load of its own."""
