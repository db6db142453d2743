"""Real engines behind a real kvroute."""

import os

# Before gRPC is imported: its fork handlers hang a child, now and then, between fork and exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
