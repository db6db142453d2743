"""Orders of the queue, by name, and the keys by which they sort waiting requests. Pure."""
