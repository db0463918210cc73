"""Evaluation of a recorded run: the sections of its summary, each a pure function of its logs."""
