"""The ways out: files, reports, Prometheus, Grafana."""
