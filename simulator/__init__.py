"""Simulated engines, without GPUs, and traffic for them. Only the CLI imports this package."""
