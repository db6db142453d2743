"""Sockets around router/front/exchange.py: aiohttp before and behind, kvroute.client beside it."""
