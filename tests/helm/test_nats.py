"""NATS as a part of the release: what is rendered runs in a real nats-server."""

import base64
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import helm_python as helm
import nats
import nats.errors
import pytest

from events.plane import subjects
from events.plane.broker import Broker
from events.plane.settings import NatsSettings
from indexer.identity import WorkerKey
from router.cluster.children.nats_server import server_binary
from router.cluster.children.process import end, start
from tests.helm.rendered import Object, Rendered, program_config, values_of
from tests.stage.waiting import free_port, repeated, until


@pytest.fixture(scope="module")
def cluster(render: Callable[..., Rendered]) -> Rendered:
    return render(**values_of("nats-cluster"))


@pytest.fixture(scope="module")
def single(render: Callable[..., Rendered]) -> Rendered:
    return render(nats={"server": {"enabled": True}}, exampleEngine={"enabled": True})


def secret(rendered: Rendered) -> dict[str, str]:
    data = rendered["nats-secret.yaml"]["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def variable(container: Object, name: str) -> Object:
    (found,) = [each for each in container["env"] if each["name"] == name]
    return found


def test_the_default_has_no_nats(default: Rendered) -> None:
    assert not [template for template in default.by_template if template.startswith("nats")]


def test_routers_and_relays_reach_it_with_users_and_a_ca_of_the_secret(
    single: Rendered, tmp_path: Path
) -> None:
    nats = program_config(single, tmp_path).nats
    assert nats.url == "tls://demo-kvroute-nats.inference.svc:4222"
    assert f"--nats={nats.url}" in single.relay["args"]
    assert nats.tls_ca_file == "/etc/kvroute-nats/tls/ca.crt"
    ca = variable(single.relay, "KVROUTE_NATS_TLS_CA_FILE")
    assert ca["value"] == nats.tls_ca_file
    for container, user in ((single.router, "router"), (single.relay, "relay")):
        for key in ("user", "password"):
            source = variable(container, f"KVROUTE_NATS_{key.upper()}")["valueFrom"]
            name = f"{user}-{key}"
            assert source["secretKeyRef"] == {"name": "demo-kvroute-nats", "key": name}
            assert name in secret(single)
    (volume,) = [one for one in single.pod["spec"]["volumes"] if one["name"] == "nats-tls"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"]


def test_no_password_stands_outside_of_the_secret(cluster: Rendered) -> None:
    passwords = [value for key, value in secret(cluster).items() if key.endswith("-password")]
    assert len(set(passwords)) == 3
    assert all(len(password) == 43 for password in passwords)
    others = {name: one for name, one in cluster.by_template.items() if name != "nats-secret.yaml"}
    assert not [password for password in passwords if password in str(others) + cluster.notes]


def test_three_servers_are_a_cluster_and_one_is_none(cluster: Rendered, single: Rendered) -> None:
    assert cluster["nats-statefulset.yaml"]["spec"]["replicas"] == 3
    headless = cluster["nats-service-headless.yaml"]
    assert cluster["nats-statefulset.yaml"]["spec"]["serviceName"] == headless["metadata"]["name"]
    config = secret(cluster)["nats.conf"]
    for i in range(3):
        assert f"@demo-kvroute-nats-{i}.demo-kvroute-nats-headless.inference.svc:6222" in config
    assert cluster["nats-poddisruptionbudget.yaml"]["spec"]["maxUnavailable"] == 1
    assert "cluster" not in secret(single)["nats.conf"]
    assert "jetstream" not in config.lower()
    assert "nats-poddisruptionbudget.yaml" not in single


def test_servers_run_the_router_s_image_or_another_one(render: Callable[..., Rendered]) -> None:
    def servers_of(**image: str) -> Object:
        rendered = render(
            image={"digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
            nats={"server": {"enabled": True, "image": image}},
        )
        (server,) = rendered["nats-statefulset.yaml"]["spec"]["template"]["spec"]["containers"]
        assert server["command"][0] == "nats-server"
        if not image:
            assert server["image"] == rendered.router["image"]
        return server

    assert servers_of()["imagePullPolicy"] == "Always"
    assert servers_of(repository="nats")["image"] == "nats:latest"
    other = servers_of(repository="nats", tag="2.15-alpine")
    assert (other["image"], other["imagePullPolicy"]) == ("nats:2.15-alpine", "IfNotPresent")


def test_only_one_or_three(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmValuesError, match="/nats/server/replicas"):
        chart.render({"nats": {"server": {"enabled": True, "replicas": 2}}})


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"nats": {"url": "nats://other"}}},
        {"nats": {"userSecret": {"name": "mine"}}},
        {"nats": {"tlsSecret": {"name": "mine"}}},
        {"nats": {"credentialsSecret": {"name": "mine"}}},
    ],
)
def test_a_server_of_yours_beside_it_is_refused(chart: helm.Chart, values: Object) -> None:
    nats = {**values.get("nats", {}), "server": {"enabled": True}}
    with pytest.raises(helm.HelmRenderError, match=r"nats\.server\.enabled makes users"):
        chart.render({**values, "nats": nats})


class Servers:
    """Rendered servers on loopback: only paths, ports and host names differ from the chart's."""

    def __init__(self, rendered: Rendered, folder: Path) -> None:
        self.files = secret(rendered)
        self.folder = folder
        self.ports: list[int] = []

    def settings(self, user: str) -> NatsSettings:
        return NatsSettings(
            user=self.files[f"{user}-user"],
            password=self.files[f"{user}-password"],
            tls_ca_file=str(self.folder / "ca.crt"),
        )

    def broker(self, user: str, server: int = 0) -> Broker:
        url = f"tls://localhost:{self.ports[server]}"
        return Broker(self.settings(user), url, f"test {user}")


@asynccontextmanager
async def servers(rendered: Rendered, folder: Path) -> AsyncIterator[Servers]:
    made = Servers(rendered, folder)
    count = rendered["nats-statefulset.yaml"]["spec"]["replicas"]
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (folder / name).write_text(made.files[name])
    routes = [free_port() for _ in range(count)]
    made.ports = [free_port() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for i in range(count):
            config = made.files["nats.conf"]
            for before, after in (
                ("$POD_NAME", f"nats-{i}"),
                ("/etc/nats", str(folder)),
                ("/var/run/nats/nats.pid", str(folder / f"{i}.pid")),
                ("port: 4222", f"host: 127.0.0.1, port: {made.ports[i]}"),
                ("http_port: 8222\n", ""),
                ("port: 6222", f"host: 127.0.0.1, port: {routes[i]}"),
            ):
                assert before in config or count == 1
                config = config.replace(before, after)
            for j, port in enumerate(routes):
                name = f"demo-kvroute-nats-{j}.demo-kvroute-nats-headless.inference.svc:6222"
                config = config.replace(name, f"localhost:{port}")
            file = folder / f"{i}.conf"
            file.write_text(config)
            with (folder / f"{i}.log").open("wb") as output:
                process = await start([server_binary(), "--config", str(file)], output)
            stack.push_async_callback(end, process)
        yield made


@pytest.fixture
async def running(single: Rendered, tmp_path: Path) -> AsyncIterator[Servers]:
    async with servers(single, tmp_path) as made:
        yield made


async def test_a_real_server_takes_routers_and_relays_with_their_rights(running: Servers) -> None:
    router, relay = running.broker("router"), running.broker("relay")
    try:
        for broker in (router, relay):
            await broker.connect()
        received: list[bytes] = []

        async def note(message: object) -> None:
            received.append(message.data)  # type: ignore[attr-defined]

        await router.subscribe(subjects.all_of("default", "facts"), note)
        fact = subjects.facts("default", WorkerKey("pod-1", 0))
        await repeated(lambda: relay.publish(fact, b"fact"), lambda: received, "its message")
        assert set(received) == {b"fact"}
        control = subjects.control("default")
        refused = partial(relay.counts.__getitem__, "error")
        await repeated(lambda: relay.publish(control, b"remove"), refused, "a refusal")
    finally:
        for broker in (router, relay):
            await broker.close()


@pytest.mark.parametrize("password", ["", "wrong"])
async def test_nobody_comes_in_without_a_password(running: Servers, password: str) -> None:
    context = ssl.create_default_context(cafile=str(running.folder / "ca.crt"))
    log = running.folder / "0.log"
    await until(lambda: "Server is ready" in log.read_text(), "the server")
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(
            f"tls://localhost:{running.ports[0]}",
            user="router",
            password=password,
            tls=context,
            allow_reconnect=False,
            max_reconnect_attempts=0,
        )


async def test_what_one_server_of_the_cluster_takes_another_delivers(
    cluster: Rendered, tmp_path: Path
) -> None:
    async with servers(cluster, tmp_path) as running:
        router, relay = running.broker("router", 0), running.broker("relay", 2)
        try:
            for broker in (router, relay):
                await broker.connect()
            received: list[bytes] = []

            async def note(message: object) -> None:
                received.append(message.data)  # type: ignore[attr-defined]

            await router.subscribe(subjects.all_of("default", "facts"), note)

            fact = subjects.facts("default", WorkerKey("pod-1", 0))
            await repeated(lambda: relay.publish(fact, b"fact"), lambda: received, "its message")
        finally:
            for broker in (router, relay):
                await broker.close()
