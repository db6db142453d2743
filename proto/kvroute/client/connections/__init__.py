"""How a call reaches a router: lines, lanes, retries, routers that are silent."""
