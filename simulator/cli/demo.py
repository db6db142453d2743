"""`kvroute demo`: every part of kvroute in a process of its own, in front of stand-in engines.

this process     eight stand-in engines, the client that replays the trace
child processes  nats-server, `kvroute relay` for all eight, `kvroute serve`

In its last part, chats through a gateway, engines, router and gateway run in this process, and
their relays in a child process of the router.
"""

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter

import click
import msgspec
import yaml
from rich.console import Console

from kvroute.client import KvRouteClient
from kvroute.v1 import Progress, ProgressResult
from router.app.cli.text import line
from router.cluster.children.nats_server import NatsChild, NatsChildError
from router.cluster.children.process import end, start
from router.decide.policies import POLICIES
from simulator.cli.demo_chats import show_chats
from simulator.cli.gateway import workers_ready
from simulator.cli.options import write_json
from simulator.live import demo
from simulator.live.clock import ScaledClock
from simulator.live.stand_ins import StandIn, stand_ins
from simulator.study.progress import watch
from simulator.traffic.trace import TraceRequest


async def run_demo(
    policies: Sequence[str], speed: float | None, json_file: Path | None, verbose: bool
) -> int:
    """Replays the trace once for each policy, prints a table, then sends chats through a gateway.

    speed: engine seconds in a wall second; None: demo.SPEED. json_file: file for the table's
    numbers. Returns the exit code, 1 if a request failed. Raises UsageError for an unknown policy.
    """
    if unknown := [name for name in policies if name not in POLICIES]:
        raise click.UsageError(f"unknown policy {unknown[0]!r}; there are {', '.join(POLICIES)}")
    console = Console(stderr=False)
    trace = demo.demo_trace()
    speed = speed or demo.SPEED
    minutes = len(policies) * (trace[-1].arrival_s / speed + 5) / 60
    console.print(
        f"{len(trace)} requests of a public trace, {len(demo.demo_engines())} stand-in engines,"
        f" {len(policies)} policies in turn, each from cold caches:"
        f" about {minutes:.1f} minutes at {speed:g} times the trace's pace.\n"
    )
    runs = []
    for policy in policies:
        async with _stage(policy, speed, verbose) as (clock, engines, routing):
            with watch(console) as watcher:
                run = await demo.replay(
                    policy,
                    trace,
                    {engine.engine_id: engine.engine for engine in engines},
                    routing,
                    clock=clock,
                    on_progress=watcher.begin(policy),
                )
        runs.append(run)
        for reason, count in sorted(run.failures.items()):
            console.print(line(f"{policy}: {count} failed: {reason}"), style="red")
    console.print()
    console.print(demo.table(runs))
    if json_file is not None:
        write_json(json_file, demo.to_json(runs))
        console.print(f"written to {json_file}")
    answered = await show_chats(console)
    return 1 if any(run.failed for run in runs) or not answered else 0


class ClientRouting:
    """The demo's client of the router: each pick and each report is a gRPC call."""

    def __init__(self, client: KvRouteClient) -> None:
        self._client = client

    async def pick(self, request: TraceRequest) -> demo.Pick:
        tokens = request.token_ids().tobytes()
        started = perf_counter()
        pick = await self._client.route(
            token_ids=tokens, expected_output_tokens=request.output_tokens
        )
        return demo.Pick(pick.worker_id, pick.reservation_id, perf_counter() - started)

    async def report(self, progress: Progress) -> None:
        (outcome,) = await self._client.report(progress)
        if outcome.result != ProgressResult.PROGRESS_RESULT_APPLIED:
            raise RuntimeError(f"the router did not apply a report: {outcome}")


@asynccontextmanager
async def _stage(
    policy: str, speed: float, verbose: bool
) -> AsyncIterator[tuple[ScaledClock, Sequence[StandIn], ClientRouting]]:
    """Runs NATS, engines, relays and a router within the block; yields the engines' clock, the
    engines, and the client of the router."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-demo-")))
        nats = NatsChild()
        stack.push_async_callback(nats.stop)
        try:
            await nats.start()
        except NatsChildError as error:
            raise click.ClickException(str(error)) from error
        clock = ScaledClock(speed)
        engines = await stack.enter_async_context(stand_ins(demo.demo_engines(), clock))
        socket = folder / "router.sock"
        router = {
            "nats": {"url": nats.url},
            "grpc": {"listen": "127.0.0.1:0", "unix_socket": str(socket)},
            "metrics": {"listen": ""},
            "routing": {"policy": policy},
        }
        relay = {
            "nats": {"url": nats.url},
            "metrics": {"listen": ""},
            "workers": [engine.relay_settings() for engine in engines],
        }
        await stack.enter_async_context(_kvroute("serve", router, folder, verbose))
        await stack.enter_async_context(_kvroute("relay", relay, folder, verbose))
        client = await stack.enter_async_context(KvRouteClient(f"unix:{socket}"))
        await workers_ready(client, len(engines))
        yield clock, engines, ClientRouting(client)


@asynccontextmanager
async def _kvroute(
    command: str, config: Mapping[str, object], folder: Path, verbose: bool
) -> AsyncIterator[None]:
    """Runs `kvroute COMMAND` with this configuration as a child process within the block. If the
    block fails after the child has ended by itself, prints the child's log to stderr."""
    file = folder / f"{command}.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(config)), encoding="utf-8")
    logfile = folder / f"{command}.log"
    with logfile.open("wb") as output:
        program = [sys.executable, "-m", "router.app.main", command, "--config", str(file)]
        process = await start(program, None if verbose else output)
    try:
        yield
    except Exception:
        if process.returncode is not None and not verbose:
            sys.stderr.write(logfile.read_text(errors="replace"))
        raise
    finally:
        await end(process)
