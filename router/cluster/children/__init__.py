"""Processes and relays that a router runs beside itself."""
