"""`kvroute simulate`: runs engines until a signal, and prints commands to run kvroute with them."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from router.net.keys.exposure import is_loopback
from simulator.live.addresses import LOOPBACK, Ports
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from simulator.live.words import words_answer

_PROMPT = (
    "A router that knows the cache of every engine sends a prompt to the engine that has computed"
    " most of it already, and gives its reasons."
)
"""Prompt of the printed commands: two blocks of 64 one-byte tokens, and some more."""


Engines = AbstractAsyncContextManager[list[StandIn]]
"""Stand-in engines that run within an `async with` block."""


async def run_live(
    running: Engines,
    console: Console,
    *,
    host: str = LOOPBACK,
    drain_s: float = 0.0,
    router_file: Path | None = None,
) -> int:
    """Runs engines until SIGINT or SIGTERM; returns the exit code.

    host: where the engines listen. drain_s: seconds that requests may go on after SIGTERM.
    router_file: file for a configuration of `kvroute serve`. Raises OSError or zmq.ZMQError for an
    address that can't be bound, OSError for a file that can't be written.
    """
    loop = asyncio.get_running_loop()
    stopping, ended = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, ended.set)
    async with running as engines:
        if router_file is not None:
            workers = [engine.relay_settings() for engine in engines]
            router_file.write_text(  # noqa: ASYNC240  # once
                yaml.safe_dump({"workers": workers}, sort_keys=False), encoding="utf-8"
            )
        console.print(engines_table(engines), crop=False)
        warn_of_strangers(console, host)
        _show_next(console, engines, router_file)
        ends = asyncio.create_task(ended.wait())
        drains = asyncio.create_task(_drained(engines, stopping, drain_s))
        await asyncio.wait({ends, drains}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ends, drains):
            task.cancel()
    return 0


async def _drained(engines: Sequence[StandIn], stopping: asyncio.Event, drain_s: float) -> None:
    await stopping.wait()
    if drain_s:
        await asyncio.gather(*(engine.api.drain(drain_s) for engine in engines))


@asynccontextmanager
async def live_engines(
    configs: Sequence[EngineConfig],
    *,
    speed: float = 1.0,
    host: str = LOOPBACK,
    ports: Sequence[Ports] = (),
) -> AsyncIterator[list[StandIn]]:
    """Runs engines, whose answers a person can read, within the block. speed: engine seconds to a
    wall second. host, ports: as for stand_ins."""
    clock = ScaledClock(speed)
    async with stand_ins(configs, clock, host=host, ports=ports, answer=words_answer) as engines:
        yield engines


def warn_of_strangers(console: Console, host: str) -> None:
    """Prints a warning if the engines listen on an address that other machines reach."""
    if not is_loopback(host):
        console.print(
            f"\nwarning: engines listen on {host} and check no keys, as vLLM and SGLang by default:"
            " all that reach it can send requests, and read the prompts of others in the events",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def engines_table(engines: Sequence[StandIn]) -> Table:
    """A table of the engines' addresses."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("engine", "http", "events", "replay"):
        shown.add_column(name, no_wrap=True)
    for engine in engines:
        shown.add_row(
            engine.engine_id, engine.address, engine.events_endpoint, engine.replay_endpoint
        )
    return shown


def show_commands(console: Console, title: str, lines: Sequence[str]) -> None:
    """Prints a title and commands for a shell, which can be copied as they are."""
    console.print(f"\n{title}")
    for line in lines:
        console.print(f"  {escape(line.rstrip())}", highlight=False, soft_wrap=True)


def _show_next(console: Console, engines: Sequence[StandIn], router_file: Path | None) -> None:
    first = engines[0]
    model = first.engine.config.model
    if router_file is not None:
        lines = [f"kvroute serve --config {router_file}"]
    else:
        lines = ["kvroute serve"]
        lines += [
            f"kvroute relay --worker-id {engine.engine_id} --address {engine.address}"
            f" --events {engine.events_endpoint} --replay {engine.replay_endpoint}"
            f" --topic {engine.topic} --metrics-listen ''"
            for engine in engines
        ]
    lines += [
        "kvroute workers",
        f"curl {first.address}/v1/completions -H 'Content-Type: application/json'"
        f''' -d '{{"model": "{model}", "prompt": "{_PROMPT}", "max_tokens": 8}}' ''',
        f'kvroute explain --text "{_PROMPT}"',
    ]
    show_commands(console, "to try, each in a shell of its own:", lines)
    console.print("\nCtrl-C ends the engines.")
