"""Turns of waiting requests: bands, tenants' shares, siblings, and rounds over a pool. Pure."""
