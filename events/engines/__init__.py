"""Engines' event formats, sockets and load pages. No NATS."""
