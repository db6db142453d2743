"""What the hot paths cost, side by side with another router."""

import os

# Before anything imports gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
"""As docs/call-it.md has it for callers."""
