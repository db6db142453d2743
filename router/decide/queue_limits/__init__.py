"""Limits of the admission queue: bounds on what waits, tenants' quotas, the drain rate. Pure."""
