"""Scrapes as series: the log, the table, and resets."""
