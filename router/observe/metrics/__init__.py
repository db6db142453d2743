"""Metrics: collectors that read the state at each scrape, and their HTTP port. Decides nothing."""
