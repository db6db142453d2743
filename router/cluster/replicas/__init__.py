"""Messages between routers, and operators' commands, over NATS."""
