"""What all tests share."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from router.service.grpc_polling import prepare

gc.disable()  # until all tests are imported: nothing of that is freed
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


def pytest_collection_finish() -> None:
    """The garbage collector runs from now on, and never goes over what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def logs_kept() -> Iterator[None]:
    """Puts the root logger back: commands that run in a test's process set its level and handlers,
    and a later test would miss the warnings that it waits for."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if root.level != level or root.handlers != handlers:
        root.handlers[:] = handlers
        root.setLevel(level)
