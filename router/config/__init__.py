"""The configuration: frozen settings, and how they are read. Only reading.py reads files and the
environment."""
