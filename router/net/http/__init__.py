"""HTTP ports: their addresses, TLS, and bounds on connections."""
