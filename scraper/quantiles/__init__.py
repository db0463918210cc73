"""Percentiles of scraped histograms, from buckets and sums, with their uncertainty."""

from sidelight.scraper.quantiles.estimates import Estimates, estimate, fit, read, read_rows

__all__ = ["Estimates", "estimate", "fit", "read", "read_rows"]
