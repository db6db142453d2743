"""Frozen settings with their bounds, a file for each subject. Pure."""
