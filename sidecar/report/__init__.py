"""Everything derived from a run directory."""
