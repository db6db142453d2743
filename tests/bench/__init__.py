"""What the hot paths cost, side by side with a peer."""

import os

from router.service.grpc_polling import prepare

prepare(os.environ)  # before anything imports gRPC, as the `kvroute` command does
