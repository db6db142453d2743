"""The gRPC face. Decides nothing."""
