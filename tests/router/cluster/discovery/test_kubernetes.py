"""Discovery against Kubernetes' API over real HTTP, with a router that notes what it is to do."""

import asyncio
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from events.engines.access import EngineAccess
from events.plane.clock import unix_now
from events.plane.settings import EngineSettings
from router.cluster.discovery import kubernetes
from router.cluster.discovery.kubernetes import KubernetesDiscovery, NoApi
from router.config.settings.discovery_settings import KubernetesSettings
from router.request.refusal import Reason, Refusal
from tests.stage.kubernetes import KubernetesServer, kubernetes_server, pod
from tests.stage.waiting import free_port, until


class Notes:
    """A router's part that notes."""

    def __init__(self) -> None:
        self.relays: dict[str, EngineSettings] = {}
        self.forgotten: list[str] = []
        self.held: frozenset[str] = frozenset()
        self.full = False
        self.away = False

    def look(self) -> None: ...

    def running(self, worker_id: str) -> bool:
        return worker_id in self.relays

    def elsewhere(self, worker_id: str, address: str) -> bool:
        return False

    def others(self) -> Collection[str]:
        return ()

    def removed(self, worker_id: str) -> bool:
        return False

    def access(self, worker_id: str, address: str) -> EngineAccess:
        return EngineAccess(address)

    def start(self, settings: EngineSettings) -> str:
        if self.away:
            return "NATS is away"
        if self.full:
            raise Refusal(Reason.INVALID_FIELD, "256 relays run in this router")
        self.relays[settings.id] = settings
        return ""

    def leave(self, worker_id: str, reason: str) -> None:
        self.relays.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        self.relays.pop(worker_id, None)
        self.forgotten.append(worker_id)

    def hold(self, held: frozenset[str]) -> None:
        self.held = held


class Stage:
    """Discovery, the API that it watches, and what it had the router do."""

    def __init__(self, api: KubernetesServer, port: int, folder: Path) -> None:
        self.api = api
        self.port = port
        self.folder = folder
        self.notes = Notes()
        self.owner = "vllm"
        """Whose models the engine has."""

    def pod(self, name: str, **changes: object) -> None:
        """Puts a pod of the engine into the cluster."""
        annotations = {"kvroute.io/port": str(self.port)}
        self.api.put(pod(name, **({"annotations": annotations} | changes)))  # type: ignore[arg-type]

    async def followed(self, *names: str) -> None:
        """Waits until these pods have relays, and no others."""
        await until(lambda: sorted(self.notes.relays) == sorted(names), f"relays of {names}")


@asynccontextmanager
async def a_stage(folder: Path) -> AsyncIterator[Stage]:
    """An engine on loopback, and Kubernetes' API."""
    (folder / "token").write_text("secret-token\n")
    (folder / "namespace").write_text("inference")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": stage.owner}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with kubernetes_server() as api:
        stage = Stage(api, runner.addresses[0][1], folder)
        try:
            yield stage
        finally:
            await runner.cleanup()


@asynccontextmanager
async def discovering(
    stage: Stage, account_folder: Path | None = None, **changes: object
) -> AsyncIterator[KubernetesDiscovery]:
    wanted: dict[str, object] = {
        "enabled": True,
        "selector": "app=vllm",
        "api": stage.api.url,
    }
    discovery = KubernetesDiscovery(
        KubernetesSettings(**(wanted | changes)),  # type: ignore[arg-type]
        stage.notes,
        replica="router-a",
        copied_labels=("revision",),
        clock=unix_now,
        rng=random.Random(1),
        account_folder=account_folder or stage.folder,
    )
    discovery.start()
    try:
        yield discovery
    finally:
        await discovery.stop()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with a_stage(tmp_path) as made:
        yield made


async def test_pods_come_and_go(stage: Stage) -> None:
    stage.pod("a")
    async with discovering(stage):
        await stage.followed("a")
        stage.pod("b")
        stage.pod("other", labels={"app": "web"})
        await stage.followed("a", "b")
        stage.pod("a", ready=False)
        await until(lambda: stage.notes.held == {"a"}, "a pod that is not ready gets no requests")
        stage.api.delete("a")
        await stage.followed("b")
        assert stage.notes.forgotten == ["a"]
    assert set(stage.api.tokens) == {"Bearer secret-token"}
    assert set(stage.api.selectors) == {"app=vllm"}


async def test_a_renewed_token_is_used_from_the_next_request_on(stage: Stage) -> None:
    stage.pod("a")
    async with discovering(stage):
        await stage.followed("a")
        (stage.folder / "token").write_text("next-token")
        stage.api.end()
        stage.api.end()
        await until(lambda: "Bearer next-token" in stage.api.tokens, "the next token")


async def test_long_lists_come_in_pages(stage: Stage) -> None:
    stage.api.page_items = 7
    for i in range(30):
        stage.pod(f"p{i}")
    async with discovering(stage):
        await stage.followed(*(f"p{i}" for i in range(30)))
    assert stage.api.requests["list pods"] == 5


async def test_410_lists_again_and_forgets_what_went_meanwhile(stage: Stage) -> None:
    stage.pod("a")
    stage.pod("b")
    async with discovering(stage) as discovery:
        await stage.followed("a", "b")
        await until(lambda: stage.api.watches == 1, "a watch")
        stage.api.silently(delete="a")
        stage.api.gone()
        await stage.followed("b")
        stage.pod("c")
        await stage.followed("b", "c")
        assert discovery.watched.counts["gone"] == 1


async def test_a_watch_whose_version_is_refused_lists_again(stage: Stage) -> None:
    stage.pod("a")
    async with discovering(stage) as discovery:
        await stage.followed("a")
        await until(lambda: stage.api.watches == 1, "a watch")
        stage.api.compact()
        stage.api.end()
        await until(lambda: discovery.watched.counts["gone"] == 1, "410 as a status")
        stage.pod("b")
        await stage.followed("a", "b")


async def test_a_connection_that_breaks_in_the_middle_of_a_line_loses_nothing(stage: Stage) -> None:
    stage.pod("a")
    async with discovering(stage) as discovery:
        await stage.followed("a")
        await until(lambda: stage.api.watches == 1, "a watch")
        stage.api.cut()
        stage.pod("b")
        await stage.followed("a", "b")
        assert discovery.watched.counts["cut"] == 1
        assert discovery.watched.counts["unreadable"] == 0


async def test_a_slow_list_holds_up_nothing_and_is_waited_for(stage: Stage) -> None:
    stage.pod("a")
    stage.api.may_list.clear()
    async with discovering(stage) as discovery:
        await until(lambda: stage.api.requests["list pods"] == 1, "a list under way")
        assert not discovery.settled(lambda _: True)
        stage.api.may_list.set()
        await stage.followed("a")
        await until(lambda: discovery.settled(stage.notes.relays.__contains__), "a settled fleet")


async def test_pods_stay_while_the_api_is_away(stage: Stage) -> None:
    stage.pod("a")
    async with discovering(stage) as discovery:
        await stage.followed("a")
        stage.api.forbidden = {"list pods", "watch pods"}
        stage.api.end()
        await until(lambda: discovery.watched.failures >= 2, "failures")
        assert sorted(stage.notes.relays) == ["a"]
        stage.api.forbidden = set()
        stage.pod("b")
        await stage.followed("a", "b")


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_missing_right_is_told_with_verb_and_resource(
    stage: Stage, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage.pod("a")
    stage.api.forbidden = {f"{verb} pods"}
    async with discovering(stage) as discovery:
        await until(lambda: discovery.watched.failures >= 3, "refusals")
        assert f"may not {verb} pods (403)" in discovery.trouble()
        assert f"a Role with the verb '{verb}' on pods" in discovery.trouble()
        assert "system:serviceaccount:inference:kvroute" in discovery.trouble()
        told = [line for line in caplog.messages if "403" in line]
        assert len(told) == 1
        stage.api.forbidden = set()
        await stage.followed("a")
        await until(lambda: discovery.trouble() == "", "the end of the trouble")


async def test_the_engine_says_its_kind(stage: Stage) -> None:
    stage.owner = "sglang"
    stage.pod("a")
    async with discovering(stage):
        await stage.followed("a")
    assert stage.notes.relays["a"].engine == "sglang"


async def test_a_pod_that_is_no_engine_gets_no_relay_and_is_told(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.owner = "somebody"
    stage.pod("a")
    async with discovering(stage) as discovery:
        await until(lambda: discovery.followed.troubles(), "a trouble")
        assert "neither vLLM nor SGLang nor TensorRT-LLM" in discovery.followed.troubles()["a"]
        await until(lambda: any("neither vLLM" in line for line in caplog.messages), "a line")
        stage.owner = "vllm"
        await stage.followed("a")


@pytest.mark.parametrize("port", ["9" * 5000, "0", "65536", "x", "\u0663", ""])
async def test_a_pod_with_an_odd_port_costs_no_other_pod_its_relay(
    stage: Stage, caplog: pytest.LogCaptureFixture, port: str
) -> None:
    def says(pod: str) -> bool:
        return any(f"{pod} has no relay: kvroute.io/port" in line for line in caplog.messages)

    odd = {"annotations": {"kvroute.io/port": port}}
    stage.pod("a-odd", **odd)
    stage.pod("b")
    async with discovering(stage):
        await stage.followed("b")
        stage.pod("c-odd", **odd)
        stage.pod("d")
        await stage.followed("b", "d")
        await until(lambda: says("a-odd") and says("c-odd"), "warnings with the pods' names")
        stage.pod("a-odd")  # mended
        await stage.followed("a-odd", "b", "d")


async def test_an_error_that_nothing_foresaw_costs_its_pod_alone(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def access(worker_id: str, address: str) -> EngineAccess:
        if worker_id == "a":
            raise RuntimeError("odd")
        return whole_access(worker_id, address)

    def start(settings: EngineSettings) -> str:
        if settings.id == "b":
            raise RuntimeError("odder")
        return whole_start(settings)

    whole_access, stage.notes.access = stage.notes.access, access  # type: ignore[method-assign]
    whole_start, stage.notes.start = stage.notes.start, start  # type: ignore[method-assign]
    for name in "abc":
        stage.pod(name)
    async with discovering(stage) as discovery:
        await stage.followed("c")
        await until(lambda: len(discovery.followed.troubles()) == 2, "two troubles")
        assert discovery.followed.troubles() == {
            "a": "RuntimeError('odd')",
            "b": "RuntimeError('odder')",
        }
        stage.pod("d")
        await stage.followed("c", "d")


async def test_zone_rack_and_host_are_labels_where_nodes_may_be_read(stage: Stage) -> None:
    stage.api.nodes["node-a"] = {
        "topology.kubernetes.io/zone": "eu-1a",
        "example.com/rack": "r7",
        "other": "x",
    }
    stage.pod("a")
    async with discovering(stage, rack_label="example.com/rack"):
        await stage.followed("a")
        stage.pod("b")
        await stage.followed("a", "b")
    expected = {"zone": "eu-1a", "rack": "r7", "host": "node-a"}
    assert stage.notes.relays["a"].labels == expected
    assert stage.notes.relays["b"].labels == expected
    assert stage.api.requests["get nodes"] == 1


async def test_nodes_that_may_not_be_read_keep_no_pod_from_its_relay(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.api.forbidden = {"get nodes"}
    stage.pod("a")
    async with discovering(stage, rack_label="example.com/rack") as discovery:
        await stage.followed("a")
        assert discovery.counts["nodes"] == 1
        assert stage.notes.relays["a"].labels == {"host": "node-a"}
        stage.api.forbidden = set()
        stage.api.nodes["node-a"] = {"example.com/rack": "r7"}
        stage.pod("b")
        await stage.followed("a", "b")
        assert stage.notes.relays["b"].labels == {"host": "node-a", "rack": "r7"}
        stage.api.forbidden = {"get nodes"}
        stage.pod("c", node="node-b")
        await stage.followed("a", "b", "c")
    told = [line for line in caplog.messages if "may not get nodes (403)" in line]
    assert len(told) == 2, "once before and once after it was in order"


def inference_pool(app: str, *ports: int) -> dict[str, object]:
    numbers = [{"number": port} for port in ports]
    return {"spec": {"selector": {"matchLabels": {"app": app}}, "targetPorts": numbers}}


async def test_a_pool_brings_selector_and_ports_and_may_change(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "POOL_S", 0.05)
    monkeypatch.setattr(kubernetes, "STEP_S", 0.05)
    stage.api.put(pod("a"))
    stage.api.put(pod("b", labels={"app": "sglang"}))
    async with discovering(stage, selector="", pool="qwen") as discovery:
        await until(lambda: "status 404" in discovery.trouble(), "a pool that is not there")
        stage.api.pool = inference_pool("vllm", free_port())
        await until(lambda: discovery.followed.troubles(), "a port without an engine")
        stage.api.pool = inference_pool("vllm", stage.port)
        await stage.followed("a")
        assert stage.notes.relays["a"].address == f"http://127.0.0.1:{stage.port}"
        stage.api.pool = inference_pool("sglang", stage.port)
        await stage.followed("b")
        assert stage.notes.forgotten == ["a", "a"]
        stage.api.forbidden = {"get inferencepools"}
        await until(lambda: "get inferencepools (403)" in discovery.trouble(), "a missing right")
        assert sorted(stage.notes.relays) == ["b"]


async def test_a_relay_without_room_is_counted_and_told(stage: Stage) -> None:
    stage.notes.full = True
    stage.pod("a")
    async with discovering(stage) as discovery:
        await until(lambda: discovery.counts["no_room"] >= 1, "no room")
        assert discovery.followed.troubles() == {"a": "256 relays run in this router"}


async def test_a_router_without_nats_is_told_and_is_not_one_without_room(stage: Stage) -> None:
    stage.notes.away = True
    stage.pod("a")
    async with discovering(stage) as discovery:
        await until(lambda: discovery.followed.troubles() == {"a": "NATS is away"}, "a trouble")
        stage.notes.away = False
        await stage.followed("a")
        assert (discovery.counts["no_room"], discovery.followed.counts["started"]) == (0, 1)


async def test_no_task_is_left(stage: Stage) -> None:
    before = asyncio.all_tasks()
    stage.pod("a")
    async with discovering(stage):
        await stage.followed("a")
    stage.api.end()
    await until(lambda: stage.api.watches == 0, "the end of the watch")
    await until(lambda: asyncio.all_tasks() <= before, "the end of all tasks")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"selector": ""}, "either a selector or a pool"),
        ({"pool": "qwen"}, "either a selector or a pool"),
        ({"api": None}, "KUBERNETES_SERVICE_HOST is not set"),
        ({"account_folder": Path("/nowhere")}, r"discovery\.kubernetes\.namespace is empty"),
    ],
)
async def test_what_can_not_be_followed_is_refused_with_its_key(
    stage: Stage, changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoApi, match=complaint):
        async with discovering(stage, **changes):
            pass


async def test_the_api_of_a_cluster_has_its_address_in_every_pod(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kubernetes._cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "https://10.0.0.1:443"
    both = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert kubernetes._cluster(both) == "https://[fd00::1]:6443"
