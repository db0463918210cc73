"""Workloads: the draft's reference workloads, data sets, traces and a user's own distributions."""
