"""Requests assembled from spans as they arrive, for a resident sidecar."""
