"""The router's side of events: ordered facts become the fleet view and the index."""
