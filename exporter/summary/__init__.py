"""The objects of summary.json."""
