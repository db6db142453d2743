"""Picks without a router, and when they begin. Pure."""
