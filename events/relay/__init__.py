"""Beside the engine: its bytes become ordered facts on NATS."""
