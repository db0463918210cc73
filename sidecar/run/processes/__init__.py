"""Processes of a run: children, their supervision and the places where they run."""
