"""Text for display on a terminal, in a page or in a spreadsheet cell."""
