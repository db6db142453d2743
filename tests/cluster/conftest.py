"""The cluster that the tests share. They need KVROUTE_CLUSTER, which `make cluster` sets.

It is "dry", or the folder of a cluster that runs (`python -m tests.cluster test`, or `shell`).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster

NAMED = os.environ.get("KVROUTE_CLUSTER", "")
collect_ignore_glob = {"": ["test_*.py"], "dry": ["test_[!d]*.py"]}.get(NAMED, [])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    assert NAMED, "KVROUTE_CLUSTER is not set: these tests are run by `make cluster`"
    if NAMED == "dry":
        with Cluster(dry=True) as started:
            yield started
    else:
        yield Cluster.attach(Path(NAMED))
