"""Real engines behind a real kvroute."""

import os

from router.service.grpc_polling import prepare

prepare(os.environ)  # before anything imports gRPC, as the `kvroute` command does
