"""What all tests share."""

import os

# Before anything imports gRPC: its fork handlers can hang a child that we start, and our children
# (started by exec) never use it. The `kvroute` command does the same.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
