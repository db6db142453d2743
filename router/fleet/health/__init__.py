"""Which workers answer, fail, or hold less than they say. Pure."""
