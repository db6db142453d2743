"""Real engines behind a real kvroute."""

import os

# As the `kvroute` command does, before anything imports gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
