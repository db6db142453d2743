"""The state of a router as the console shows it, in messages of JSON. Reads only. Pure."""
