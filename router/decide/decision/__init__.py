"""Decisions: which worker would get a request. They change nothing but the rng's state. Pure."""
