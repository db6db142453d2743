"""Commands that call a running router. Only they open connections of gRPC."""
