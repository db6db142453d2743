"""Traces and their results. Pure except for reading files."""
