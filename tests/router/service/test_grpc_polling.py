"""What gRPC's core is told before it starts."""

import os
import subprocess
import sys

from router.service.grpc_polling import EXPERIMENTS, prepare

SERVE = "import grpc; server = grpc.server(None); server.start(); server.stop(None)"


def test_the_core_knows_what_it_is_told() -> None:
    environment = dict(os.environ)
    environment.pop("GRPC_EXPERIMENTS")
    prepare(environment)
    assert environment["GRPC_EXPERIMENTS"] == EXPERIMENTS
    assert _complaints(environment) == ""
    assert "no_such_thing" in _complaints({**environment, "GRPC_EXPERIMENTS": "-no_such_thing"})


def test_a_user_knows_better() -> None:
    environment = {"GRPC_EXPERIMENTS": "", "GRPC_ENABLE_FORK_SUPPORT": "1"}
    prepare(environment)
    assert environment == {"GRPC_EXPERIMENTS": "", "GRPC_ENABLE_FORK_SUPPORT": "1"}


def _complaints(environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", SERVE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ran.stderr
