"""Between any face and the core: reads requests, writes answers, counts."""
