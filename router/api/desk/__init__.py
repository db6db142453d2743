"""Life of a request between its protocol and the core: reads requests, writes answers, counts."""
