"""A router with every port: python -m tests.hostile.server ENGINES [FOLDER]

ENGINES: what tests/hostile/engines.py said. FOLDER: the server has TLS and keys, whose files are
written there. The first line on standard
output has the ports, as JSON. Each line on standard input is answered with the process's memory and
the longest turn of its loop since the last one. The process ends when its input does.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from events.plane.settings import EngineSettings
from router.app.cli.run import settle
from router.app.processes.logs import set_up
from router.app.processes.router_process import RouterApp
from router.config.settings.configurations import ServeConfig
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.keys_settings import KeysSettings, ProbesSettings
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.config.settings.serving_settings import (
    GrpcSettings,
    HttpSettings,
    LogSettings,
    MetricsSettings,
)
from router.net.listener import http_bounds
from simulator.cli.gateway import workers_ready
from tests.hostile.good import GOOD, HOSTILE, a_client
from tests.hostile.target import pin
from tests.stage.certificates import Authority, written
from tests.stage.channel import lines, say
from tests.stage.keys import identity, write_keys
from tests.stage.processes import resident_bytes

ANY = "127.0.0.1:0"
HEAD_S = 2.0
"""Shorter than the default, so that slow heads meet their bound in a run of seconds."""


class Said(msgspec.Struct):
    """The first line of the engines' process."""

    workers: tuple[EngineSettings, ...]


class Turns:
    """The loop's turns: what is run between two looks for events, all steps of all tasks together.
    Its longest one is at least as long as its longest step."""

    TICK_S = 0.002

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._before_s = time.thread_time()
        self.longest_s = 0.0
        """CPU time of the loop's thread, up to TICK_S too much."""
        self._tick()

    def _tick(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._before_s)
        self._before_s = now_s
        self._loop.call_later(self.TICK_S, self._tick)


def write_locks(folder: Path) -> dict[str, Any]:
    """TLS, a key without limits and one with limits; the router's configuration of them."""
    authority = Authority()
    (folder / "authority.pem").write_bytes(authority.pem)
    limits = {"requests_per_s": 2, "reservations": 2, "mib_per_s": 1}
    keys = write_keys(folder, identity(GOOD), identity(HOSTILE, limits=limits))
    return {"tls": written(folder, authority.issue()), "keys": KeysSettings(file=keys)}


async def run(workers: tuple[EngineSettings, ...], folder: Path | None) -> int:
    pin(attacker=False)
    set_up(LogSettings(level="error"))
    http_bounds.HEAD_TIMEOUT_S = HEAD_S
    locks = {} if folder is None else write_locks(folder)
    app = RouterApp(
        ServeConfig(
            grpc=GrpcSettings(listen=ANY),
            gateway=GatewaySettings(listen=ANY),
            picker=PickerSettings(listen=ANY),
            requests=RequestSettings(drain_timeout_s=1.0),
            metrics=MetricsSettings(listen=ANY, tls="off" if folder is None else "server"),
            probes=ProbesSettings(listen=ANY),
            http=HttpSettings(connections_max=256),
            drain_timeout_s=1.0,
            workers=workers,
            **locks,
        )
    )
    await app.start()
    try:
        at = app.listeners
        async with a_client(at.grpc_port, folder) as client:
            await workers_ready(client, len(workers))
        say(
            grpc=at.grpc_port,
            gateway=at.gateway_port,
            picker=at.picker_port,
            metrics=at.metrics_port,
            probes=at.probes_port,
        )
        turns = Turns()
        async for _ in lines():
            say(resident_mib=resident_bytes() / (1 << 20), turn_ms=1e3 * turns.longest_s)
            turns.longest_s = 0.0
    finally:
        await app.stop()
    return 0


def main(said: str, folder: str | None = None) -> int:
    workers = msgspec.json.decode(said, type=Said).workers
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(workers, Path(folder) if folder else None))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    settle()
    sys.exit(main(*sys.argv[1:]))
