"""Comparisons, capacities, reports and pictures of runs."""
