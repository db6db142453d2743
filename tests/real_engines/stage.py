"""The whole of it on loopback: real NATS, real engines, relays and the router as processes."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from kvroute.client import KvRouteClient, KvRouteError
from kvroute.v1 import WorkerStatus
from router.cluster.children.nats_server import server_binary
from tests.real_engines.engines import Engine, Sglang, Vllm, samples
from tests.real_engines.processes import Child
from tests.stage.waiting import free_port

ENGINE_START_S = 900.0
RECOVERY_S = 60.0
_POLL_S = 0.02
RARE = (
    "kvroute_stream_faults", "kvroute_facts_dropped", "kvroute_recoveries_",
    "kvroute_broker_errors", "kvroute_forgotten",
    'kvroute_reservations_ended_total{ending="expired"',
    "kvroute_relay_engine_faults", "kvroute_relay_socket_errors",
    "kvroute_relay_events_total",
)  # fmt: skip

log = logging.getLogger("real_engines")


def to_the_end(work: Coroutine[Any, Any, int]) -> int:
    """Runs a phase, with its log on standard error; the exit code. SIGINT and SIGTERM cancel it, so
    that engines are stopped."""
    form = "%(asctime)s %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=form, datefmt="%H:%M:%S")

    async def cancellable() -> int:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel if task else lambda: None)
        return await work

    try:
        return asyncio.run(cancellable())
    except (StageBroken, aiohttp.ClientError, asyncio.CancelledError) as error:
        log.error("broken off: %s: %s", type(error).__name__, error)
        return 1


class StageBroken(RuntimeError):
    """A part of the stage failed; the message says which, with the end of its log."""


@dataclass
class Stage:
    """What runs."""

    nats: Child
    router: Child
    relays: dict[str, Child]
    engines: dict[str, Engine]
    client: KvRouteClient
    session: aiohttp.ClientSession
    metrics: dict[str, str]
    """Process -> address of its metrics."""
    target: str
    """The router's gRPC address."""

    async def counters(self) -> dict[str, float]:
        """What routers and relays count of things that should be rare, as far as it happened."""
        told: dict[str, float] = {}
        for name, url in self.metrics.items():
            with suppress(aiohttp.ClientError):
                for key, count in (await samples(self.session, url)).items():
                    if key.startswith(RARE) and not key.endswith("_created") and count:
                        told[f"{name}: {key}"] = count
        return told

    async def workers(self) -> list[WorkerStatus]:
        """The fleet as the router sees it; empty while the router is away."""
        try:
            return await self.client.list_workers(timeout_s=1.0)
        except KvRouteError:
            return []

    async def ready(self, changed_after_s: float = 0.0, of: Sequence[str] = ()) -> None:
        """Waits until these workers (absent: all) are live and may be picked.

        changed_after_s: Unix time of a fault. What the router says of a stream that hasn't changed
        since then is from before it.
        """
        wanted = {one.worker_id: one.ranks for one in self.engines.values()}
        deadline_s = time.monotonic() + RECOVERY_S
        while True:
            known = await self.workers()
            fit = [
                one
                for one in known
                if one.schedulable
                and one.stream_state == "live"
                and one.stream_changed_at.ToNanoseconds() / 1e9 > changed_after_s
            ]
            if all(
                sum(one.worker_id == name for one in fit) == wanted[name] for name in of or wanted
            ):
                return
            if time.monotonic() > deadline_s:
                told = "; ".join(
                    f"{one.worker_id}/{one.dp_rank} {one.stream_state} ({one.stream_reason})"
                    f" {one.unschedulable_reason}"
                    for one in known
                )
                raise StageBroken(f"not schedulable again after {RECOVERY_S:g} s: {told}")
            await asyncio.sleep(_POLL_S)

    async def engine_up(self, engine: Engine) -> float:
        """Waits until a started engine answers; returns how long that took."""
        since_s = time.monotonic()
        while not await engine.answers():
            if not engine.child.running:
                raise StageBroken(f"{engine.worker_id} died\n{engine.child.last_words()}")
            if time.monotonic() - since_s > ENGINE_START_S:
                raise StageBroken(f"{engine.worker_id} is not up\n{engine.child.last_words()}")
            await asyncio.sleep(0.1)
        return time.monotonic() - since_s

    def check_alive(self) -> None:
        """Raises StageBroken when a process is gone that nobody killed."""
        engines = [engine.child for engine in self.engines.values()]
        for child in (self.nats, self.router, *self.relays.values(), *engines):
            if not child.running:
                raise StageBroken(f"{child.name} died\n{child.last_words()}")


def _kvroute() -> list[str]:
    return [sys.executable, "-m", "router.app.main"]


@dataclass(frozen=True)
class Ground:
    """What an engine is made with."""

    build: Path
    logs: Path
    sockets: Path
    session: aiohttp.ClientSession

    def vllm(self, worker_id: str, **about: Any) -> Vllm:
        return Vllm(worker_id, self.build, self.logs, self.sockets, self.session, **about)

    def sglang(self, worker_id: str, **about: Any) -> Sglang:
        return Sglang(worker_id, self.build, self.logs, self.sockets, self.session, **about)


def mixed_fleet(ground: Ground) -> list[Engine]:
    """Both engines, one rank and two."""
    return [
        ground.vllm("vllm-one", blocks=96),
        ground.vllm("vllm-two", blocks=64, ranks=2, replay_batches=10),
        ground.sglang("sglang", blocks=192),
    ]


def _clear(logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for old in (*logs.glob("*.log"), *logs.glob("*.json*")):
        if old.name != "install.log":
            old.unlink()


@asynccontextmanager
async def a_stage(
    build: Path,
    logs: Path,
    fleet_of: Callable[[Ground], list[Engine]] = mixed_fleet,
    flags: Sequence[str] = (),
) -> AsyncIterator[Stage]:
    """Everything up, every worker schedulable; at the end everything is stopped.

    flags: more of them for the router.
    """
    _clear(logs)
    async with AsyncExitStack() as stack:
        sockets = Path(stack.enter_context(TemporaryDirectory(prefix="kvroute-")))
        # An engine may end an idle connection just as it is used again: each request has its own.
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                timeout=aiohttp.ClientTimeout(total=120),
            )
        )
        fleet = fleet_of(Ground(build, logs, sockets, session))
        engines = {engine.worker_id: engine for engine in fleet}
        nats_port, grpc_port, metrics_port = free_port(), free_port(), free_port()
        target = f"127.0.0.1:{grpc_port}"
        nats_url = f"nats://127.0.0.1:{nats_port}"
        server = [server_binary(), "--addr", "127.0.0.1", "--port", str(nats_port)]
        serve = [
            *(*_kvroute(), "serve", "--nats", nats_url),
            *("--grpc-listen", target),
            *("--metrics-listen", f"127.0.0.1:{metrics_port}", "--log-format", "plain"),
            *flags,
        ]
        metrics = {"router": f"http://127.0.0.1:{metrics_port}/metrics"}
        relays = {}
        for name, engine in engines.items():
            port = free_port()
            relay = [
                *(*_kvroute(), "relay", "--nats", nats_url, *engine.relay_flags()),
                *("--metrics-listen", f"127.0.0.1:{port}", "--log-format", "plain"),
            ]
            metrics[f"relay {name}"] = f"http://127.0.0.1:{port}/metrics"
            relays[name] = Child(f"relay-{name}", relay, logs)
        client = await stack.enter_async_context(KvRouteClient(target))
        stage = Stage(
            Child("nats", server, logs),
            Child("router", serve, logs),
            relays,
            engines,
            client,
            session,
            metrics,
            target,
        )
        for child in (
            stage.nats,
            *(engine.child for engine in engines.values()),
            stage.router,
            *relays.values(),
        ):
            stack.push_async_callback(child.stop)
        await stage.nats.start()
        await stage.router.start()
        for engine in engines.values():
            await engine.child.start()
        log.info("starting %s", ", ".join(engines))
        await asyncio.gather(*(stage.engine_up(engine) for engine in engines.values()))
        for relay_child in relays.values():
            await relay_child.start()
        await stage.ready()
        yield stage
