"""The processes that scrape pages (`python -m scraper.worker`) and receive spans (`python -m scraper.worker.spans`).

They are two, so that the stamps of scrapes need not wait for the spans of others.
"""
