"""Which worker gets the request: a pure decision core, with gRPC, metrics and CLI shells."""
