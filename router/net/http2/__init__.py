"""A gRPC server on kvroute's own small HTTP/2: frames, streams, and the calls of handlers. Imports
router/net/listener and no other folder of the router. Modules that say so are pure."""
