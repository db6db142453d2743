"""This replica's reservations: open requests, their load, sessions. Pure."""
