"""Sockets around an exchange (router/gateway): aiohttp, and kvroute.client beside it."""
