"""Examination of an endpoint, or of a gateway before it, without load: what answers, and what to switch on."""
