"""What routers say to one another, and to operators, over NATS."""
