"""Rolling upgrades under load, counted by a plain HTTP/1.1 client that sends nothing twice."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.cluster import engines
from tests.cluster.cluster import Cluster
from tests.cluster.load import Load
from tests.cluster.release import Release

LONG_TOKENS = 3000
"""Of a stream that outlasts an upgrade: 45 s and more at the engines' speed."""
PAIRED_RATE = 20
PAIRED_REQUESTS = 10_000
HALVES = ("prefill", "decode")


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


def halves(revision: int) -> list[dict[str, Any]]:
    """Four prefill and four decode engines of a revision, which finish what they have begun."""
    return [
        engines.deployment(
            half,
            4,
            model="paired",
            arguments=["--engine=sglang", "--engines=0", f"--{half}=1", "--drain-s=120"],
            labels={"revision": str(revision)},
            grace_s=150,
        )
        for half in HALVES
    ]


def test_a_rollout_of_pairs_mixes_no_revisions(cluster: Cluster) -> None:
    release = Release(cluster, "revisions")
    revisions: dict[str, int] = {}
    """Replica set -> its revision; Kubernetes keeps the last ten of a Deployment."""

    def roll(revision: int) -> None:
        release.apply(*halves(revision))
        for half in HALVES:
            release.kubectl("rollout", "status", f"deployment/{half}", "--timeout=300s")
        for pod in release.get("pods", f"--selector=revision={revision}"):
            revisions[replica_set(pod["metadata"]["name"])] = revision

    roll(1)
    values = engines.found(replicaCount=2, nats={"server": {"enabled": True}})
    values["config"]["gateway"]["answer_headers"] = True
    release.install(values)
    release.wait_for_workers(8)
    with Load(cluster, rate=PAIRED_RATE, **release.client("paired")) as load:
        begun_s = time.monotonic()
        for revision in count(2):
            roll(revision)
            release.wait_for_workers(8)
            if (time.monotonic() - begun_s) * PAIRED_RATE > PAIRED_REQUESTS:
                break
    by_revision: Counter[tuple[int, ...]] = Counter()
    for pair, answers in load.pairs.items():
        by_revision[tuple(revisions[replica_set(pod)] for pod in pair.split())] += answers
    assert by_revision.total() >= PAIRED_REQUESTS, by_revision
    assert {prefill for prefill, _ in by_revision} == set(revisions.values())
    assert all(prefill == decode for prefill, decode in by_revision), by_revision
    assert load.failed == []
    release.uninstall()
    release.end()


def replica_set(pod: str) -> str:
    """Its name, which a pod's name begins with."""
    return pod.rpartition("-")[0]
