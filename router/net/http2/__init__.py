"""gRPC over a small HTTP/2 of its own: frames, streams, calls of handlers. Imports `listener` and
no other folder; pure, but for sockets and calls."""
