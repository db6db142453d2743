"""Which worker would get a request. Changes nothing but the rng. Pure."""
