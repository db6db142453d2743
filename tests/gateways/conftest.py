"""The gateways before which kvroute is tried, one after another, on a cluster.

They need KVROUTE_CLUSTER, as the tests of tests/cluster do, and KVROUTE_GATEWAYS, which is Envoy's
program: `make gateways` sets both.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import conftest as shared
from tests.cluster.cluster import Cluster
from tests.gateways import binaries
from tests.gateways.gateways import GATEWAYS, Gateway
from tests.gateways.images import Maker
from tests.gateways.stage import Stage, addresses

ENVOY = os.environ.get("KVROUTE_GATEWAYS", "")
cluster = shared.cluster
collect_ignore_glob = [] if ENVOY else ["test_gateways.py", "test_conformance.py"]


@pytest.fixture(scope="session")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("images"), Path(ENVOY))


@pytest.fixture(scope="session")
def epp(maker: Maker, cluster: Cluster) -> None:
    """The cluster has what runs in the place of the conformance suite's EPP and model servers."""
    binaries.build(("inference-conformance", "echo-basic"))
    cluster.load(*maker.conformance(cluster.archives / "kvroute.tar"))


@pytest.fixture(scope="session")
def network(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose Services of type LoadBalancer get addresses."""
    with addresses(cluster):
        yield cluster


@pytest.fixture(scope="session", params=GATEWAYS, ids=lambda gateway: gateway.name)
def stage(request: pytest.FixtureRequest, network: Cluster, maker: Maker) -> Iterator[Stage]:
    gateway: Gateway = request.param
    binaries.build(gateway.programs)
    network.load(*maker(gateway.name))
    stage = Stage(network, gateway)
    try:
        stage.install()
        yield stage
    finally:
        stage.end()
