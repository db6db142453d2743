"""What a request is, and why one is refused. Pure; knows no gRPC."""
