"""Traces: read, made, and what came of them. Pure but for files."""
