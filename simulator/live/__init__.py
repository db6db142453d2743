"""Stand-in engines: they speak real ZMQ and HTTP, and their time is that of a clock."""
