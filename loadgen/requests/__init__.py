"""The table of requests, and every client metric derived from it."""
