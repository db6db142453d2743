"""The path of facts: from engine bytes to ordered, typed facts.

The relay stands on the engine's side, the feed on the router's.
"""
