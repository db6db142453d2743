"""`kvroute simulate`: engines on loopback until a signal, and commands to run kvroute with them."""

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from simulator.live.words import words_answer

_PROMPT = (
    "A router that knows the cache of every engine sends a prompt to the engine that has computed"
    " most of it already, and gives its reasons."
)
"""Two blocks of 64 one-byte tokens, and some more."""


async def run_live(
    configs: Sequence[EngineConfig],
    console: Console,
    *,
    speed: float = 1.0,
    port: int = 0,
    router_file: Path | None = None,
) -> int:
    """Runs engines until SIGINT or SIGTERM; returns the exit code.

    speed: engine seconds to a wall second. port: of the first engine, 0: free ports. router_file:
    file for a configuration of `kvroute serve`. Raises OSError or zmq.ZMQError for a port that is
    taken, OSError for a file that can't be written.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with live_engines(configs, speed=speed, port=port) as engines:
        if router_file is not None:
            router_file.write_text(router_yaml(engines), encoding="utf-8")  # noqa: ASYNC240  # once
        console.print(engines_table(engines), crop=False)
        _show_next(console, engines, router_file)
        await ended.wait()
    return 0


def live_engines(
    configs: Sequence[EngineConfig], *, speed: float, port: int
) -> AbstractAsyncContextManager[list[StandIn]]:
    """Engines whose answers a person can read."""
    return stand_ins(configs, ScaledClock(speed), port=port, answer=words_answer)


def router_yaml(engines: Sequence[StandIn]) -> str:
    """A configuration for `kvroute serve` with the engines' relays in its process."""
    return yaml.safe_dump(
        {"workers": [engine.relay_settings() for engine in engines]}, sort_keys=False
    )


def engines_table(engines: Sequence[StandIn]) -> Table:
    """The engines' addresses."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("engine", "http", "events", "replay"):
        shown.add_column(name, no_wrap=True)
    for engine in engines:
        shown.add_row(
            engine.engine_id, engine.address, engine.events_endpoint, engine.replay_endpoint
        )
    return shown


def show_commands(console: Console, title: str, lines: Sequence[str]) -> None:
    """Commands for a shell, word for word."""
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
