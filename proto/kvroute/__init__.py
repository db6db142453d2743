"""kvroute's public face: the generated contract in `kvroute.v1`, a client in `kvroute.client`."""
