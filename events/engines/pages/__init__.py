"""Engines' HTTP pages about identity and load. `load` is pure; `probe` requests the pages."""
