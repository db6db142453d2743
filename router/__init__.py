"""Which worker gets the request: the decision core (pure), and the gRPC, metrics and CLI shells around it."""
