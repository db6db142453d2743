"""The router's gRPC services. Decides nothing."""
