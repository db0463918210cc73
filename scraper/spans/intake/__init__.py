"""Intake of exports: connections, bodies and turns, and the check of an export before it is logged."""
