"""Engines' event formats and sockets; their HTTP pages are in `pages`. No NATS."""
