"""A differential fuzzer: readers of bytes beside the libraries that define what is right."""
