"""vLLM V1's scheduler, step by step. Pure."""
