"""Real gateways before kvroute on a real cluster: `make gateways`. See README.md."""
