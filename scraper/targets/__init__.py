"""What is scraped, and how each target is asked."""
