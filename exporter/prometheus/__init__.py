"""The Prometheus page of a run or a watch."""
