"""The engine's side of events: its bytes become ordered facts on NATS."""
