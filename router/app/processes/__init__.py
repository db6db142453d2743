"""Assembles the parts of each process, and starts and stops them in order."""
