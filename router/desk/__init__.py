"""What lies between every server and the core: reads requests, writes answers, counts."""
