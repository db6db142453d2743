"""Connections of a port: from their acceptance to their end, within bounds."""
