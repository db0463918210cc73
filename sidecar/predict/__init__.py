"""Predictions of a recorded run: its twin, the answer, and their report and page."""
