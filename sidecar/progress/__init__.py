"""Progress of a run on standard error: a live panel on a terminal, a line every few seconds elsewhere, JSON lines
for machines, or nothing.
"""
