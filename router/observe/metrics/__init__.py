"""Reads the state at each scrape, and serves it. Decides nothing."""
