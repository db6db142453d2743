"""Decides which prefixes to copy to which workers. Returns effects. Pure."""
