"""Sockets of HTTP ports: addresses, TLS, and bounds on connections."""
