"""In the router: ordered facts become the fleet view and the index."""
