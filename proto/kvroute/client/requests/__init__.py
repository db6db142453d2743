"""One request of a caller, from its reservation to its last report. Knows no connection."""
