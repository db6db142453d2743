"""Rolling upgrades under load, counted by a plain HTTP/1.1 client that sends nothing twice."""

from collections.abc import Iterator

import pytest

from tests.cluster import engines
from tests.cluster.cluster import Cluster
from tests.cluster.load import Load
from tests.cluster.release import Release

LONG_TOKENS = 3000
"""Of a stream that outlasts an upgrade: 45 s and more at the engines' speed."""


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    release = Release(cluster, "rolling")
    release.apply(
        engines.deployment("engine", 3, arguments=["--drain-s=120"], grace_s=150),
        # These end at once at SIGTERM, whatever they have begun.
        engines.deployment("abrupt", 2, model="abrupt"),
    )
    release.install(engines.found(replicaCount=2, nats={"server": {"enabled": True}}))
    release.wait_for_workers(5)
    yield release
    release.uninstall()
    release.end()


def test_routers_nats_and_engines_roll_without_a_failed_request(
    cluster: Cluster, release: Release
) -> None:
    options = release.client(engines.MODEL)
    with Load(cluster, rate=4, long_tokens=LONG_TOKENS, **options) as load:
        release.upgrade(
            engines.found(
                replicaCount=2,
                nats={"server": {"enabled": True}},
                config={"log": {"level": "debug"}},
            )
        )
        release.helm("rollback", "1", "--wait", "--timeout", "5m")
        for what in ("statefulset/kvroute-nats", "deployment/engine"):
            release.kubectl("rollout", "restart", what)
            release.kubectl("rollout", "status", what, "--timeout=300s")
        release.wait_for_workers(5)
    assert load.failed == []


def test_engines_that_end_at_once_lose_only_answers_that_had_begun(
    cluster: Cluster, release: Release
) -> None:
    release.wait_for_workers(5)
    before = release.count("kvroute_gateway_requests_total", outcome="cut")
    with Load(cluster, rate=4, long_tokens=LONG_TOKENS, **release.client("abrupt")) as load:
        release.kubectl("rollout", "restart", "deployment/abrupt")
        release.kubectl("rollout", "status", "deployment/abrupt", "--timeout=300s")
        release.wait_for_workers(5)
    assert load.failed, "no answer was on its way"
    assert [one for one in load.failed if not one["begun"]] == []
    assert release.count("kvroute_gateway_requests_total", outcome="cut") - before == len(
        load.failed
    )
