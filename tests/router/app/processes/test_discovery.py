"""Pods of stand-in engines behind a router that finds them: NATS, relays and load are real."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client import generate_latest

from events.plane.settings import EngineSettings
from kvroute.client import KvRouteError
from kvroute.v1 import Progress, ProgressState
from router.app.processes import router_process
from router.app.processes.router_process import RouterApp
from router.cluster.children.nats_server import NatsChild
from router.config.keys import ConfigError
from router.config.settings.discovery_settings import DiscoverySettings, KubernetesSettings
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from tests.stage.kubernetes import KubernetesServer, kubernetes_server, pod
from tests.stage.loopback import router_app, serve_config
from tests.stage.waiting import until


def port_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def put(api: KubernetesServer, engine: StandIn, *, ready: bool = True, uid: str = "1") -> None:
    """A pod of this engine."""
    annotations = {
        "kvroute.io/port": port_of(engine.address),
        "kvroute.io/events-port": port_of(engine.events_endpoint),
        "kvroute.io/replay-port": port_of(engine.replay_endpoint),
        "kvroute.io/slots": "64",
    }
    api.put(pod(engine.engine_id, ready=ready, uid=uid, annotations=annotations))


def discovery_of(api: KubernetesServer, **changes: object) -> DiscoverySettings:
    wanted: dict[str, object] = {
        "enabled": True,
        "namespace": "inference",
        "selector": "app=vllm",
        "api": api.url,
    }
    return DiscoverySettings(kubernetes=KubernetesSettings(**(wanted | changes)))  # type: ignore[arg-type]


@asynccontextmanager
async def a_cluster(count: int) -> AsyncIterator[tuple[KubernetesServer, dict[str, StandIn]]]:
    """Kubernetes' API without pods, and engines."""
    scheduler = SchedulerConfig(block_count=512, block_size=16)
    configs = [EngineConfig(f"vllm-{i}", scheduler) for i in range(count)]
    async with kubernetes_server() as api, stand_ins(configs, ScaledClock(100.0)) as engines:
        yield api, {engine.engine_id: engine for engine in engines}


def picked(app: RouterApp) -> list[str]:
    """Workers that may get requests."""
    fleet = app.core.fleet
    return sorted(
        source.key.worker_id for source in app.view.sources.values() if not fleet.excluded(source)
    )


async def may_be_picked(app: RouterApp, *names: str) -> None:
    await until(lambda: picked(app) == sorted(names), f"picks of {names}, not {picked(app)}")


async def test_the_fleet_follows_pods_that_come_and_go_under_load() -> None:
    async with AsyncExitStack() as stack:
        api, engines = await stack.enter_async_context(a_cluster(4))
        for name in ("vllm-0", "vllm-1"):
            put(api, engines[name])
        config = serve_config(None, discovery=discovery_of(api))
        app, client = await stack.enter_async_context(router_app(config))
        await may_be_picked(app, "vllm-0", "vllm-1")
        await until(lambda: app.ready, "a ready router")
        gone: set[str] = set()
        served: Counter[str] = Counter()
        late: list[str] = []
        rng = random.Random(7)

        async def load() -> None:
            while True:
                before = set(gone)
                try:
                    pick = await client.route(token_ids=[rng.randrange(1000) for _ in range(64)])
                except KvRouteError:
                    continue  # for a moment there may be no pod
                # Gone before the call, and still gone: meanwhile it may have come back.
                late.extend({pick.worker_id} & before & gone)
                served[pick.worker_id] += 1
                await client.report(
                    Progress(
                        reservation_id=pick.reservation_id,
                        state=ProgressState.PROGRESS_STATE_FINISHED,
                    )
                )
                await asyncio.sleep(0.001)

        callers = [asyncio.create_task(load()) for _ in range(4)]
        try:
            put(api, engines["vllm-2"])
            await may_be_picked(app, "vllm-0", "vllm-1", "vllm-2")
            await until(lambda: served["vllm-2"], "requests on the new pod")
            put(api, engines["vllm-0"], ready=False)
            await may_be_picked(app, "vllm-1", "vllm-2")
            gone.add("vllm-0")
            api.delete("vllm-1")
            await may_be_picked(app, "vllm-2")
            gone.add("vllm-1")
            put(api, engines["vllm-3"])
            await may_be_picked(app, "vllm-2", "vllm-3")
            gone.discard("vllm-0")
            put(api, engines["vllm-0"])
            await may_be_picked(app, "vllm-0", "vllm-2", "vllm-3")
            gone.discard("vllm-1")
            put(api, engines["vllm-1"], uid="2")  # as a StatefulSet's pod comes back
            await may_be_picked(app, "vllm-0", "vllm-1", "vllm-2", "vllm-3")
            for caller in callers:
                assert not caller.done()
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        assert late == []
        assert app.relays.ended["pod_gone"] == 1
        page = generate_latest(app.registry).decode()
        assert "kvroute_discovery_in_step 1.0" in page
        assert 'kvroute_discovery_workers{state="ready"} 4.0' in page


async def test_an_operators_drain_outlasts_a_pod_that_becomes_ready() -> None:
    async with AsyncExitStack() as stack:
        api, engines = await stack.enter_async_context(a_cluster(1))
        put(api, engines["vllm-0"])
        config = serve_config(None, discovery=discovery_of(api))
        app, _ = await stack.enter_async_context(router_app(config))
        await may_be_picked(app, "vllm-0")
        app.commands.apply(app.commands.give("drain", "vllm-0"))
        put(api, engines["vllm-0"], ready=False)
        await until(lambda: app.discovery and app.discovery.followed.held(), "a pod held back")
        put(api, engines["vllm-0"])
        await until(lambda: app.discovery and not app.discovery.followed.held(), "a ready pod")
        assert picked(app) == []
        app.commands.apply(app.commands.give("undrain", "vllm-0"))
        await may_be_picked(app, "vllm-0")


async def test_of_two_routers_one_follows_a_pod_and_the_other_takes_over() -> None:
    async with AsyncExitStack() as stack:
        nats = NatsChild()
        stack.push_async_callback(nats.stop)
        await nats.start()
        api, engines = await stack.enter_async_context(a_cluster(3))
        for engine in engines.values():
            put(api, engine)
        config = serve_config(nats.url, discovery=discovery_of(api))
        leaving = await stack.enter_async_context(AsyncExitStack())
        first, _ = await leaving.enter_async_context(router_app(config))
        await may_be_picked(first, *engines)
        second, _ = await stack.enter_async_context(router_app(config))
        await may_be_picked(second, *engines)
        await until(lambda: second.discovery and second.discovery.watched.listed, "its list")
        assert (len(first.relays), len(second.relays)) == (3, 0)
        api.delete("vllm-0")
        await may_be_picked(first, "vllm-1", "vllm-2")
        await may_be_picked(second, "vllm-1", "vllm-2")
        await leaving.aclose()
        await until(lambda: len(second.relays) == 2, "the second router's relays")
        await may_be_picked(second, "vllm-1", "vllm-2")


async def test_a_configured_worker_keeps_its_relay() -> None:
    async with AsyncExitStack() as stack:
        api, engines = await stack.enter_async_context(a_cluster(1))
        engine = engines["vllm-0"]
        worker = EngineSettings(
            id="gpu-a",
            engine="vllm",
            address=engine.address,
            events=engine.events_endpoint,
            replay=engine.replay_endpoint,
        )
        put(api, engine)
        discovery = discovery_of(api)
        config = serve_config(None, workers=(worker,), discovery=discovery)
        app, _ = await stack.enter_async_context(router_app(config))
        await may_be_picked(app, "gpu-a")
        await until(lambda: app.discovery and app.discovery.watched.listed, "a list")
        await may_be_picked(app, "gpu-a")
        assert len(app.relays) == 1


def test_discovery_without_a_selector_stops_the_start() -> None:
    settings = DiscoverySettings(kubernetes=KubernetesSettings(enabled=True))
    with pytest.raises(ConfigError, match="either a selector or a pool"):
        RouterApp(serve_config(None, discovery=settings))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery of a single router begins at once."""
    monkeypatch.setattr(router_process, "REPLICAS_S", 0.2)
