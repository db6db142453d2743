"""Parts of an engine: caches, block pools, cost models, profiles. Pure."""
