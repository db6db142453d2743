"""Engines' pods that come, go, fail, are annotated wrongly, and live in two Deployments."""

from collections.abc import Iterator

import pytest

from tests.cluster import engines
from tests.cluster.cluster import Cluster
from tests.cluster.load import Load
from tests.cluster.node import until
from tests.cluster.release import Release

NAMESPACE = "pods"


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Release]:
    release = Release(cluster, NAMESPACE)
    release.apply(engines.deployment("engine", 2))
    release.install(engines.found())
    release.wait_for_workers(2)
    yield release
    release.uninstall()
    release.end()


@pytest.fixture
def release(installed: Release) -> Release:
    """The release with two engines, whatever another test left."""
    for other in ("other", "wrong"):
        installed.kubectl("delete", "deployment", other, "--ignore-not-found")
    installed.kubectl("scale", "deployment/engine", "--replicas=2")
    installed.wait_for_workers(2)
    return installed


def names(release: Release) -> set[str]:
    """Names of the pods of the workers that can get requests."""
    return {one["workerId"] for one in release.workers() if one.get("schedulable")}


def test_pods_that_come_and_go_fail_no_request(cluster: Cluster, release: Release) -> None:
    with Load(cluster, rate=4, **release.client(engines.MODEL)) as load:
        release.kubectl("scale", "deployment/engine", "--replicas=4")
        release.wait_for_workers(4)
        release.kubectl("scale", "deployment/engine", "--replicas=2")
        release.wait_for_workers(2)
    assert load.failed == []


def test_a_pod_that_fails_is_replaced_by_the_next(release: Release) -> None:
    before = names(release)
    (pod, *_) = (one["metadata"]["name"] for one in release.get("pods", "-l", "app=engine"))
    release.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    until(lambda: len(names(release) - before) == 1 and len(names(release)) == 2, 120, "a new pod")


def test_two_deployments_are_one_fleet(release: Release) -> None:
    release.apply(engines.deployment("other", 1, model="another"))
    workers = release.wait_for_workers(3)
    assert sorted(one["model"] for one in workers) == ["another", *[engines.MODEL] * 2]
    release.kubectl("delete", "deployment", "other")
    release.wait_for_workers(2)


def test_a_wrong_annotation_is_said_and_costs_the_others_nothing(release: Release) -> None:
    release.apply(engines.deployment("wrong", 1, annotations={"kvroute.io/slots": "many"}))
    release.kubectl("rollout", "status", "deployment/wrong", "--timeout=120s")

    def said() -> bool:
        return "kvroute.io/slots" in release.logs()

    until(said, 60, "the router's log names the annotation", every_s=1)
    assert {one["address"] for one in release.wait_for_workers(2)}
    # A pod that is annotated anew is taken in without a restart of its engine.
    (pod,) = (one["metadata"]["name"] for one in release.get("pods", "-l", "app=wrong"))
    release.kubectl("annotate", "pod", pod, "--overwrite", "kvroute.io/slots=8")
    release.wait_for_workers(3)
    release.kubectl("delete", "deployment", "wrong")
    release.wait_for_workers(2)
