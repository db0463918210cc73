"""Planning of the requests and of their times.

Arrivals, workloads, tokenizers, and the fitted requests that the workers read.
"""
