"""The endpoint picker behind a real Envoy: `make envoy`."""
