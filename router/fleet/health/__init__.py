"""Finds workers that fail, don't answer, or hold fewer blocks than their events say. Pure."""
