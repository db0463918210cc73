"""Live views of a run: the terminal panel and the Prometheus page."""
