"""The chart's examples installed by Helm 3 and by Helm 4: tested, upgraded, rolled back, removed.

Four are in the tutorials (test_tutorials.py); the others, the default and autoscaling are here.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import engines
from tests.cluster import images as names
from tests.cluster.certificates import Files
from tests.cluster.cluster import Cluster
from tests.cluster.load import Load
from tests.cluster.nats_accounts import accounts
from tests.cluster.node import until
from tests.cluster.release import CHART, Release
from tests.helm.rendered import EXAMPLES

OF_TUTORIALS = {"gateway-vllm", "inference-pool", "nats-cluster", "sglang-pairs", "simulated"}
EVENTS = json.dumps(
    {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }
)


def stateful(name: str, image: str, command: list[str], port: int) -> list[dict[str, Any]]:
    """A StatefulSet of one engine, NAME-0.NAME."""
    labels = {"app": name}
    container = {
        "name": name,
        "image": image,
        "command": command,
        "ports": [{"containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    spec = {"clusterIP": "None", "selector": labels, "ports": [{"port": port}]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec},
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name},
            "spec": {
                "serviceName": name,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def lifecycle(release: Release, *arguments: str, workers: int, token: str = "") -> None:
    """A release of the chart from its first installation to its end. `token` is the caller's where
    the release has keys of the test."""
    wait = ("--wait", "--timeout", "5m")
    release.helm("install", str(CHART), *arguments, *wait)
    if workers:
        release.wait_for_workers(workers, token=token)
        assert "Succeeded" in release.helm("test", "--logs")
    made = token or release.secret("kvroute-keys", "token")
    changed = ("--reset-then-reuse-values", "--set", "config.log.level=debug")
    release.helm("upgrade", str(CHART), *changed, *wait)
    release.helm("rollback", "1", *wait)
    if workers:
        release.wait_for_workers(workers, token=made)  # the token and the CA are the first ones
    release.helm("uninstall", *wait)
    until(lambda: not left(release), 180, "the end of all of the release", every_s=1)


def left(release: Release) -> list[str]:
    """What a release left that was its own, but for the pod of `helm test`, which keeps its log."""
    kinds = "all,secrets,configmaps,roles,rolebindings,serviceaccounts,pdb"
    labels = "app.kubernetes.io/managed-by=Helm"
    names = (one["metadata"]["name"] for one in release.get(kinds, "--selector", labels))
    return [name for name in names if name != "kvroute-test"]


def example(name: str) -> tuple[str, str]:
    return ("-f", str(CHART / "examples" / f"{name}.yaml"))


def sets(**values: str) -> Iterator[str]:
    for key, value in values.items():
        yield from ("--set", f"{key.replace('__', '.')}={value}")


@pytest.fixture
def release(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Release]:
    """A release by the test's Helm in a namespace of its own."""
    namespace = request.node.originalname.replace("test_", "example-").replace("_", "-")
    made = Release(cluster, namespace, *getattr(request, "param", ()))
    yield made
    made.end()


def secret(name: str, **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {key.replace("__", "."): value for key, value in data.items()},
    }


@pytest.mark.parametrize("release", [("helm",), ("helm4",)], indirect=True, ids="".join)
def test_default(release: Release) -> None:
    """No worker is there: a router is ready after `ready_timeout_s`."""
    lifecycle(release, *sets(config__ready_timeout_s="1"), workers=0)


@pytest.mark.parametrize("release", [("helm",)], indirect=True)
def test_small_fleet(release: Release) -> None:
    """Two StatefulSets of engines, named one by one."""
    vllm = ["vllm", "serve", "Qwen/Qwen3-0.6B", f"--kv-events-config={EVENTS}"]
    sglang = ["python3", "-m", "sglang.launch_server", "--model-path=Qwen/Qwen3-0.6B"]
    sglang += ["--host=0.0.0.0", "--enable-metrics", f"--kv-events-config={EVENTS}"]
    release.apply(
        *stateful("vllm", names.VLLM, vllm, 8000),
        *stateful("sglang", names.SGLANG, sglang, 30000),
    )
    one_rank = ("--set", "config.workers[1].ranks=1")  # a simulated engine has no more
    lifecycle(release, *example("small-fleet"), *one_rank, workers=2)


@pytest.mark.parametrize("release", [("helm4",)], indirect=True)
def test_gateway_route(release: Release) -> None:
    """The route is taken, and leads to a Gateway that is not there: `make gateways` has some."""
    release.apply(engines.deployment("vllm-qwen3-32b", 2, model="Qwen/Qwen3-32B"))
    lifecycle(release, *example("gateway-route"), workers=2)


NATS = "nats-server --config /etc/nats/nats.conf"


def nats(name: str, config: str, files: dict[str, str]) -> list[dict[str, Any]]:
    """A NATS server that is no part of the release, behind the Service `name`."""
    labels = {"app": name}
    container = {
        "name": "nats",
        "image": names.KVROUTE,
        "command": NATS.split(),
        "ports": [{"containerPort": 4222}],
        "readinessProbe": {"tcpSocket": {"port": 4222}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/nats"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "config", "secret": {"secretName": name}}],
    }
    return [
        secret(name, nats__conf=config, **files),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": 4222}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


@pytest.mark.parametrize("release", [("helm4", "privileged")], indirect=True)
def test_vllm_with_relay(release: Release) -> None:
    """An outer NATS server with user and password; engines of the chart, each with its relay."""
    user = "authorization { user: fleet, password: of-the-test }"
    release.apply(
        *nats("nats", f"port: 4222\n{user}\n", {}),
        secret("nats-user", user="fleet", password="of-the-test"),
        secret("huggingface", token="none"),
    )
    lifecycle(release, *example("vllm-with-relay"), workers=2)


@pytest.mark.parametrize("release", [("helm",)], indirect=True)
def test_production(cluster: Cluster, release: Release, tmp_path: Path) -> None:
    """Three routers over an outer NATS server in another namespace, which asks for certificates and
    for a .creds file; keys, certificates and the priority class are the cluster's."""
    of_nats, ca = accounts(), Files(tmp_path, "ca")
    ca.sign("nats", "nats", hosts=["nats.messaging", "nats.messaging.svc"])
    ca.sign("router", "router", hosts=[f"kvroute.{release.namespace}.svc", "localhost"])
    ca.sign("client", "router")

    def pem(name: str) -> dict[str, str]:
        parts = {"ca.crt": "ca.crt", "tls.crt": f"{name}.crt", "tls.key": f"{name}.key"}
        return {key: (tmp_path / file).read_text() for key, file in parts.items()}

    tls = "".join(
        f"{key}: /etc/nats/{file}, "
        for key, file in (("ca_file", "ca.crt"), ("cert_file", "tls.crt"), ("key_file", "tls.key"))
    )
    messaging = Release(cluster, "messaging")
    messaging.apply(
        *nats("nats", f"port: 4222\n{of_nats.server}tls {{ {tls} verify: true }}\n", pem("nats"))
    )
    token = "token-of-the-test"
    digest = hashlib.sha256(token.encode()).hexdigest()
    rights = ["route", "report", "observe", "administer"]
    identity = {"name": "test", "rights": rights, "tokens": [f"sha256:{digest}"]}
    cluster.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "inference-critical"},
            "value": 1000,
        }
    )
    for node in cluster.nodes:
        cluster.kubectl("label", "node", node.name, "topology.kubernetes.io/zone=a", "--overwrite")
    release.apply(
        secret("kvroute-nats", nats__creds=of_nats.credentials),
        secret("kvroute-nats-tls", **pem("client")),
        # What cert-manager would make of the Certificate.
        secret("kvroute-tls", **pem("router")),
        secret("kvroute-keys", keys__yaml=yaml.safe_dump({"identities": [identity]}), token=token),
    )
    no_image = sets(
        image__digest="", helmTest__tokenSecret__name="kvroute-keys", config__ready_timeout_s="1"
    )
    lifecycle(release, *example("production"), *no_image, workers=0, token=token)
    messaging.end()


@pytest.mark.parametrize("release", [("helm4",)], indirect=True)
def test_autoscaling(cluster: Cluster, release: Release) -> None:
    """Routers by CPU: more under load, and an upgrade keeps the number that is there."""
    release.apply(engines.deployment("engine", 2, arguments=["--speed=20"]))
    values = engines.found(
        autoscaling={"enabled": True, "minReplicas": 1, "maxReplicas": 3, "cpuPercent": 50},
        nats={"server": {"enabled": True}},
        resources={"requests": {"cpu": "20m"}},
    )
    release.install(values)
    release.wait_for_workers(2)

    def routers() -> int:
        return int(release.get("deployment", "kvroute")["status"].get("readyReplicas", 0))

    with Load(cluster, rate=10, **release.client(engines.MODEL)) as load:
        until(lambda: routers() > 1, 300, "a second router", every_s=2)
        there = routers()
        release.upgrade({**values, "podAnnotations": {"changed": "yes"}})
        assert routers() >= there
    assert load.failed == []


def test_each_example_is_tried() -> None:
    here = {"gateway-route", "production", "small-fleet", "vllm-with-relay"}
    assert set(EXAMPLES) == here | OF_TUTORIALS
