"""Chitu's schedulers, after their published description. Pure."""
