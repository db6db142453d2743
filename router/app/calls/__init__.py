"""Commands that call a running router. Only these commands open gRPC connections."""
