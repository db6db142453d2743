"""Requests, their prompts and tokens, and the reasons for refusals. Nothing here imports gRPC."""
