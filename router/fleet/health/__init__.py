"""Which workers answer, fail, or hold fewer blocks than their events say. Pure."""
