"""What all tests share."""

import os

from hypothesis import HealthCheck, settings

from router.service.grpc_polling import prepare

prepare(os.environ)  # before anything imports gRPC, as the `kvroute` command does

# The same examples in every run, and none that fails since the machine is busy.
settings.register_profile(
    "suite",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")
