"""Curves through the levels of a test."""
