"""What the hot paths cost, side by side with a peer."""

import os

from router.grpc_core import prepare

prepare(os.environ)  # before anything imports gRPC, as the `kvroute` command does
