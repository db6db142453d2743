"""Prompt tokens of a request's body, as its engine will compute them, without a call to it."""
