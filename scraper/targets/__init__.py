"""Targets to scrape, and the requests to them."""
