"""The files of a study for people: its reports, the page, and its tables as CSV."""
