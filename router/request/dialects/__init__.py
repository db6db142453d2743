"""How each engine changes a body before its chat template. Pure."""
