"""Traces of requests, and the results of runs that play them. Pure except for reading files."""
