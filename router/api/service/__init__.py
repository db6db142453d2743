"""The router's gRPC services: they pass messages to the desk and back, and decide nothing."""
