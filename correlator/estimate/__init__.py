"""Estimates of each request's queue and prefill time from scrapes alone, with errors and quality."""
