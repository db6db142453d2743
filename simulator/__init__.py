"""Engines without GPUs, and traffic for them. Nothing but the CLI imports this package."""
