"""What a block is, and who holds which prefix. Pure: no I/O, no clock, no randomness."""
