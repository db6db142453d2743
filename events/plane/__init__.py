"""What relays and routers say to one another: facts, subjects, the NATS connection, supervised
tasks."""
