"""A console over real HTTP on loopback, of a fleet that the test plays."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from router.config.settings.console_settings import ConsoleSettings
from router.config.settings.queue_settings import QueueSettings
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.decide.core.tally import PickTally
from router.net.keys.certificates import Contexts
from router.net.keys.door import Door
from router.net.listener.http_bounds import HttpBounds
from router.observe.audit.observers import Watchers
from router.observe.console.collector import console_metrics
from router.observe.console.console import Console
from router.observe.console.pages import ConsolePages
from router.observe.console.sessions import SESSION_S, Sessions
from router.observe.metrics.families import export
from router.observe.metrics.ports import MetricsServer
from router.observe.views.summary import Subject
from tests.stage.fleet import Fleet


def raised(error: Exception) -> None:
    raise error


def watchers_of(core: RouterCore, seed: int = 1) -> Watchers:
    return Watchers(core.replica, random.Random(seed), raised)


@dataclass
class Played:
    """A console and the fleet behind it. A test steps the console itself."""

    fleet: Fleet
    console: Console
    tally: PickTally
    watchers: Watchers
    refused: dict[str, int]


def play(fleet: Fleet | None = None) -> Played:
    fleet = fleet or Fleet()
    tally, watchers, refused = PickTally(), watchers_of(fleet.core), dict[str, int]()
    subject = Subject(
        core=fleet.core,
        admission=Admission(fleet.core, QueueSettings(), random.Random(1)),
        watchers=watchers,
        tally=tally,
        refused=lambda: refused,
        connected=lambda: True,
        about={"replica": "here-0123abcd"},
    )
    console = Console(subject, fleet.clock)
    return Played(fleet, console, tally, watchers, refused)


def pages_of(
    played: Played, *, door: Door | None = None, secure: bool = False, **settings: Any
) -> ConsolePages:
    session_s = settings.pop("session_s", SESSION_S)
    about = ConsoleSettings(**settings)
    return ConsolePages(
        played.console,
        about,
        door=door,
        secure=secure,
        sessions=Sessions(session_s, random.Random(3).randbytes),
        clock=played.fleet.clock,
    )


@dataclass
class Served(Played):
    """And its pages."""

    url: str
    pages: ConsolePages
    registry: CollectorRegistry


@asynccontextmanager
async def served(
    fleet: Fleet | None = None,
    *,
    door: Door | None = None,
    tls: Contexts | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    played = play(fleet)
    pages = pages_of(played, door=door, secure=tls is not None, **settings)
    registry = CollectorRegistry()
    export(registry, console_metrics, pages)
    server = MetricsServer(registry, "127.0.0.1:0", HttpBounds(), tls, also=pages.add_to)
    await server.start()
    scheme = "http" if tls is None else "https"
    try:
        yield Served(
            **vars(played),
            url=f"{scheme}://127.0.0.1:{server.port}",
            pages=pages,
            registry=registry,
        )
    finally:
        played.console.stop()
        await server.stop()


async def event(response: aiohttp.ClientResponse) -> tuple[str, dict[str, Any]]:
    """The next server-sent event: its name and its content."""
    name, data = "", ""
    async with asyncio.timeout(60):
        while line := (await response.content.readline()).decode():
            key, _, value = line.rstrip("\n").partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                data = value
            elif not line.strip() and data:
                return name, json.loads(data)
    raise ConnectionError("the stream has ended")
