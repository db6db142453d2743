"""The desk, between services and decision core: reads requests, writes answers, counts both."""
