"""The processes that scrape pages, `python -m sidelight.scraper.worker`, and receive spans, `.spans` of it.

They are two, so that the stamps of scrapes need not wait for the spans of others.
"""
