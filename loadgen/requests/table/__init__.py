"""The table of requests: its columns, how replies become rows, and how it is filled from the logs."""
