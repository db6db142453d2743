"""What engines say and how: their event formats, sockets, load pages. No NATS."""
