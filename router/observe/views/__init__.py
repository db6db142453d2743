"""What the console shows of a router, as messages of JSON. Reads the state. Pure."""
