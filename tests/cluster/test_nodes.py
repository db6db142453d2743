"""A cluster of two nodes: policies that hold, an API server that is away, a node that dies.

It is a cluster of its own: what happens here would disturb other tests.
"""

import time
from collections.abc import Iterator

import pytest

from tests.cluster import engines
from tests.cluster import images as names
from tests.cluster.cluster import Cluster
from tests.cluster.images import archives
from tests.cluster.load import Load
from tests.cluster.node import until
from tests.cluster.release import Release


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[Cluster]:
    with Cluster("two", nodes=2) as started:
        started.load(*archives(cluster.archives))
        started.enforce_network_policies()
        yield started


@pytest.fixture
def release(two: Cluster) -> Iterator[Release]:
    release = Release(two, "away")
    release.apply(engines.deployment("engine", 2))
    release.install(engines.found())
    release.wait_for_workers(2)
    yield release
    release.end()


PROBE = """
import socket, sys, time
host, port, ends = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
said = "closed"
while said == "closed" and time.monotonic() < ends:
    try:
        socket.create_connection((host, port), 3).close(); said = "open"
    except OSError as error:
        time.sleep(0.2)
print(said)
"""


def test_network_policies_hold(two: Cluster) -> None:
    """What the release's policies let in is reached, and nothing else; probes pass."""
    release = Release(two, "fenced")
    two.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "apps", "labels": {"team": "apps"}},
        }
    )
    release.apply(engines.deployment("engine", 2))
    values = engines.found(
        networkPolicy={
            "enabled": True,
            "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "enginesTo": [{"podSelector": {"matchLabels": {"app": "engine"}}}],
        },
        nats={"server": {"enabled": True}},
    )
    release.install(values)
    # Called from the node: its own traffic to its pods is not the policies' business.
    release.wait_for_workers(2)

    def probe(namespace: str, host: str, port: int, patience_s: int = 10) -> str:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "probe", "namespace": namespace},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "probe",
                        "image": names.KVROUTE,
                        "command": ["python", "-c", PROBE, host, str(port), str(patience_s)],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
            },
        }
        two.apply(pod)
        of = ("--namespace", namespace)
        two.kubectl(
            *("wait", *of, "--for=jsonpath={.status.phase}=Succeeded", "pod/probe"),
            "--timeout=120s",
        )
        said = two.kubectl("logs", *of, "probe").split()[0]
        two.kubectl("delete", *of, "pod", "probe", "--now")
        return said

    routers, nats = "kvroute.fenced.svc.cluster.local", "kvroute-nats.fenced.svc.cluster.local"
    # What holds pods to the policies learns of a new pod some moments after its start.
    assert probe("apps", routers, 8080, patience_s=100) == "open"
    assert probe("default", routers, 8080) == "closed"
    assert probe("fenced", nats, 4222) == "closed"
    assert probe("default", nats, 4222) == "closed"
    (pod,) = release.get("pods", "--selector=app.kubernetes.io/component=router")
    assert probe("default", pod["status"]["podIP"], 9466) == "closed"
    assert all(one["restartCount"] == 0 for one in pod["status"]["containerStatuses"])
    release.uninstall()
    release.end()
    two.kubectl("delete", "namespace", "apps")


def test_an_api_server_that_is_away_costs_no_request(two: Cluster, release: Release) -> None:
    with Load(two, rate=4, **release.client(engines.MODEL)) as load:
        two.stop_api_server()
        time.sleep(30)  # how long it is away is what the test is about
        two.start_api_server()
        release.kubectl("scale", "deployment/engine", "--replicas=3")
        release.wait_for_workers(3)
    assert load.failed == []
    release.kubectl("scale", "deployment/engine", "--replicas=2")
    release.wait_for_workers(2)


def test_a_node_that_dies_costs_its_answers_alone(two: Cluster) -> None:
    """Routers and engines live on both nodes. The client calls the router of the node that stays:
    what reaches the other one is up to kube-proxy, which learns of a dead node after 40 s."""
    release = Release(two, "spread")
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "engine"}},
        }
    ]
    engine = engines.deployment("engine", 4)
    engine["spec"]["template"]["spec"]["topologySpreadConstraints"] = spread
    release.apply(engine)
    release.install(
        engines.found(
            replicaCount=2,
            nats={"server": {"enabled": True, "replicas": 3}},
            topologySpreadConstraints=[
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "DoNotSchedule",
                }
            ],
        )
    )
    release.wait_for_workers(4)
    routers = release.get("pods", "--selector=app.kubernetes.io/component=router")
    by_node = {one["spec"]["nodeName"]: one["status"]["podIP"] for one in routers}
    assert sorted(by_node) == ["node-1", "node-2"]
    options = release.client(engines.MODEL)
    options["url"] = f"https://{by_node['node-1']}:8080/v1/chat/completions"
    with Load(two, rate=4, **options) as load:
        two.kill(two.nodes[1])

        def gone() -> bool:
            (node,) = [one for one in two.get("nodes") if one["metadata"]["name"] == "node-2"]
            return any(
                one["type"] == "Ready" and one["status"] != "True"
                for one in node["status"]["conditions"]
            )

        until(gone, 180, "the node is known as dead", every_s=1)
    assert [one for one in load.failed if not one["begun"]] == []
