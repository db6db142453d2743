"""Engines' own tokens beside the router's: canaries, and the proof that both are equal."""
