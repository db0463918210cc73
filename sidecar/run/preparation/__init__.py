"""Preparation of a run: its target, its plan of requests and the probes before the load."""
