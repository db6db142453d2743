"""Envoy's external processing protocol: what the endpoint picker reads and writes."""
