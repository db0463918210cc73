"""Progress of a run on standard error: a live panel, lines, or JSON lines for machines."""
