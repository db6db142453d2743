"""kvroute's public API: the generated contract in `kvroute.v1`, a client in `kvroute.client`."""
