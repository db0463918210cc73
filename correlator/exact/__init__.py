"""Exact joins of requests and engine timings: by trace, by request id, by reply, by time."""
