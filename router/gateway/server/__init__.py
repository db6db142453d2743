"""The gateway's HTTP server and its HTTP requests to workers, by aiohttp."""
