"""Engines' HTTP pages about identity and load. Pure but for `probe`, which requests them."""
