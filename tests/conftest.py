"""What all tests share."""

import os

from router.grpc_core import prepare

prepare(os.environ)  # before anything imports gRPC, as the `kvroute` command does
