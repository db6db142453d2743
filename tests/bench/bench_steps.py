"""How long one message holds the event loop: the longest step for each kind, at its limit.

A gRPC server on the loop of this thread, with 64 workers (lists and Explain: 1,000), and a client
in a thread of its own that sends bytes. A ticker that runs in every turn of the loop notes the
longest CPU time of the loop's thread between two of its runs, so neither the client nor other
processes count. What gRPC does on that thread counts, such as the copy of a message of 16 MiB.
"""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import grpc
import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from indexer.hashing import block_hashes
from kvroute.v1 import fleet_pb2, router_pb2
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.api.desk.reports import Reports
from router.api.service.calls import Guard
from router.api.service.fleet_service import FleetService
from router.api.service.inbound import EXPLAIN, REPORT, ROUTE, ROUTE_STREAM
from router.api.service.router_service import RouterService
from router.api.service.server import GrpcServer
from router.api.service.texts import Texts
from router.app.cli.run import COLLECTED_AFTER
from router.cluster.replicas.fleet_commands import FleetCommands
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.serving_settings import GrpcSettings
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.fleet.reservations.reservations import Ending
from router.observe.audit.observers import Watchers
from router.request.tokens import Prompts
from tests.bench.bench_decision import Stage
from tests.bench.timing import row

REPEATS = 5
TOKENS = 1 << 20
WORKERS_MANY = 1000
DUE = 50_000
LIST = "/kvroute.v1.Fleet/ListWorkers"
Make = Callable[[int], bytes]
"""A message, another one for each number."""


def rows() -> list[dict[str, Any]]:
    """A row for each kind: milliseconds, the median over repeats of the longest step."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECTED_AFTER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_of_fleet(64, CASES)) | runner.run(_of_fleet(WORKERS_MANY, CASES_MANY))
        found |= runner.run(_leases())
    gc.set_threshold(*thresholds)
    worst = max(found.values())
    return [
        row("step_longest_cpu_ms", round(worst, 2), "ms", "less", "the longest of those below"),
        *(row(f"step_{name}_cpu_ms", round(ms, 2), "ms", "less") for name, ms in found.items()),
    ]


def tokens(number: int, count: int = TOKENS) -> bytes:
    return np.random.default_rng(number).integers(0, 150_000, count, np.uint32).tobytes()


def _request(number: int, **about: Any) -> bytes:
    return router_pb2.RouteRequest(request_id=f"r{number}", **about).SerializeToString()


def _images(number: int) -> bytes:
    items = [
        router_pb2.MultimodalItem(hash=i + 1, first_token=0, token_count=TOKENS) for i in range(8)
    ]
    return _request(number, token_bytes=tokens(number), multimodal_items=items)


def _ids(number: int) -> bytes:
    ids = np.frombuffer(tokens(number), np.uint32).tolist()
    return _request(number, token_ids=router_pb2.TokenIds(ids=ids))


def _hashes(number: int) -> bytes:
    hashed = router_pb2.BlockHashes(
        hashes=block_hashes(tokens(number), 16).tolist(), block_size=16, prompt_tokens=TOKENS
    )
    return _request(number, block_hashes=hashed)


def _batch(*items: router_pb2.RouteItem) -> bytes:
    return router_pb2.RouteBatch(items=items).SerializeToString()


def _long_items(number: int) -> bytes:
    return _batch(
        *(
            router_pb2.RouteItem(
                index=i,
                request=router_pb2.RouteRequest(token_bytes=tokens(10 * number + i)[:-4096]),
            )
            for i in range(4)
        )
    )


def _short_items(number: int) -> bytes:
    request = router_pb2.RouteRequest(token_bytes=tokens(number, 900))
    return _batch(*(router_pb2.RouteItem(index=i, request=request) for i in range(4096)))


def _cancels(number: int) -> bytes:
    return _batch(*(router_pb2.RouteItem(index=i, cancel=True) for i in range(4096)))


def _steps(number: int) -> bytes:
    steps = [router_pb2.Progress(reservation_id=f"{i:04}", state=2) for i in range(65_536)]
    return router_pb2.ReportRequest(progress=steps).SerializeToString()


CASES: dict[str, tuple[str, Make]] = {
    "route_tokens": (ROUTE, lambda n: _request(n, token_bytes=tokens(n))),
    "route_token_ids": (ROUTE, _ids),
    "route_hashes": (ROUTE, _hashes),
    "route_images": (ROUTE, _images),
    "route_empty_images": (ROUTE, lambda n: b"\x42\x00" * (4 << 20)),
    "route_unknown_model": (ROUTE, lambda n: _request(n, model=f"m{n}", token_bytes=tokens(n, 9))),
    "batch_long": (ROUTE_STREAM, _long_items),
    "batch_short": (ROUTE_STREAM, _short_items),
    "batch_cancels": (ROUTE_STREAM, _cancels),
    "batch_empty": (ROUTE_STREAM, lambda n: b"\x0a\x00" * (8 << 20)),
    "received_1m": (LIST, lambda n: bytes(1 << 20)),
    "received_4m": (LIST, lambda n: bytes(4 << 20)),
    "received_8m": (LIST, lambda n: bytes(8 << 20)),
    "received_16m": (LIST, lambda n: bytes(16 << 20)),
    "report": (REPORT, _steps),
    "report_empty": (REPORT, lambda n: b"\x0a\x00" * (1 << 19)),
}
CASES_MANY: dict[str, tuple[str, Make]] = {
    "explain": (EXPLAIN, lambda n: _request(n, token_bytes=tokens(n))),
    "list": (LIST, lambda n: fleet_pb2.ListWorkersRequest().SerializeToString()),
}


@dataclass(slots=True)
class _Longest:
    """The longest time between two turns of the loop, in CPU time of its thread."""

    ms: float = 0.0


async def _tick(longest: _Longest) -> None:
    before = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        longest.ms = max(longest.ms, (now - before) * 1e3)
        before = now


@asynccontextmanager
async def _serving(core: RouterCore, now_s: float) -> AsyncIterator[int]:
    """A server on this loop; yields its port."""
    stopping = asyncio.Event()
    metrics = Metrics(CollectorRegistry())

    def clock() -> float:
        return now_s

    guard = Guard.of(core.routing.prompt_tokens_max, metrics)
    admission = Admission(core, QueueSettings(), random.Random(0))
    soon = asyncio.get_running_loop().call_soon
    desk = Desk(core, metrics, clock, fault=guard.fault, admission=admission, soon=soon)
    texts = Texts(desk, core, Prompts({}))
    reports = Reports(core, metrics, clock, admission)
    service = RouterService(desk, reports, guard, stopping, texts=texts)

    async def nothing(*_: object) -> bool:
        return True

    async def registered(*_: object) -> None:
        return None

    fleet = FleetService(
        core,
        clock,
        stopping,
        admission=admission,
        commands=FleetCommands(core, clock),
        send_control=nothing,
        register=registered,
        watchers=Watchers("a", random.Random(7), print),
    )
    server = GrpcServer(GrpcSettings(listen="127.0.0.1:0"), service, fleet)
    await server.start()
    try:
        yield server.port
    finally:
        stopping.set()
        await server.drain(0)


async def _of_fleet(workers: int, cases: dict[str, tuple[str, Make]]) -> dict[str, float]:
    stage = Stage(workers)
    core = stage._core
    gc.collect()
    gc.freeze()  # as the command does, whose fleet comes in over hours
    longest = _Longest()
    found: dict[str, float] = {}
    async with _serving(core, stage._now_s) as port:
        ticker = asyncio.create_task(_tick(longest))
        channel = await asyncio.to_thread(_channel, port)
        try:
            for name, (method, make) in cases.items():
                seen = []
                for n in range(REPEATS + 1):
                    message = await asyncio.to_thread(make, 1000 * len(found) + n)
                    await asyncio.sleep(0)
                    longest.ms = 0.0
                    await asyncio.to_thread(_call, channel, method, message)
                    await asyncio.sleep(0)
                    seen.append(longest.ms)
                    for one in list(core.reservations._open.values()):
                        core.life.end(one, Ending.FINISHED, stage._now_s)
                found[name] = median(seen[1:])
        finally:
            ticker.cancel()
            await asyncio.to_thread(channel.close)
            gc.unfreeze()
    return found


def _channel(port: int) -> grpc.Channel:
    sizes = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    return grpc.insecure_channel(f"127.0.0.1:{port}", [(name, -1) for name in sizes])


def _call(channel: grpc.Channel, method: str, message: bytes) -> None:
    """Runs a call to its end, whatever that is."""
    try:
        if method == ROUTE_STREAM:
            for _ in channel.stream_stream(method)(iter([message])):
                pass
        else:
            channel.unary_unary(method)(message)
    except grpc.RpcError:
        pass  # what is too much is refused


async def _leases() -> dict[str, float]:
    """Leases that end together, in slices as router/app/processes/router_clock.py takes them."""
    stage = Stage(64)
    core = stage._core
    prompt = tokens(1, 1024)
    for n in range(DUE):
        stage.answer(_request(n, token_bytes=prompt))
    longest = _Longest()
    ticker = asyncio.create_task(_tick(longest))
    await asyncio.sleep(0)
    longest.ms = 0.0
    now_s = stage._now_s + core.routing.lease_s + 1
    core.tick(now_s)
    while core.behind(now_s):
        await asyncio.sleep(0)
        core.catch_up(now_s)
    await asyncio.sleep(0)
    ticker.cancel()
    return {"leases": longest.ms}
