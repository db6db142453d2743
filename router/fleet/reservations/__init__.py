"""This replica's promises: open requests, their load, sessions. Pure."""
