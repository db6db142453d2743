"""Messages between relays and routers: facts, subjects, the NATS connection, supervised tasks."""
