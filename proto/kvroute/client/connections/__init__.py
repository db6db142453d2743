"""How a call reaches a router: lines, batching, retries, routers that are silent."""
