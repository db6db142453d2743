"""Block identity, and the index of prefixes by worker. Pure: no I/O, no clock, no randomness."""
