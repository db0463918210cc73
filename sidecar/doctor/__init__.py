"""Examine an endpoint before a run: what answers, its metrics and timings, and how to enable what is missing; and
a gateway before it: what reaches the engine through it, and what its spans can tell.
"""
