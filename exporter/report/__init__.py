"""The report of a run for people: its content as a model, which terminals, pages and Markdown render."""
