"""What all tests share."""

import asyncio
import gc
import logging
import os
import random
import socket
import traceback
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# As the `kvroute` command does, before anything imports gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
from kvroute.client import KvRouteClient
from router.decide.decision import decider

LONG = ("bar", "chaos", "distribution", "end_to_end", "hostile", "simulation")
"""Folders of long tests: processes, whole fleets, packages. They are marked `long`, as single tests
elsewhere are: `make long` runs them, `make test` does not."""

IS_COMPILED = not decider.__file__.endswith(".py")
"""Whether the modules of setup.py's COMPILED are."""

gc.disable()  # until all tests are imported: nothing of that is freed

# The same examples in every run of the same tests, and none that fails since the machine is busy.
# Hypothesis also draws constants of the modules that are loaded: other code has other examples.
settings.register_profile(
    "suite",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in another order")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--shuffle")
    return None if seed is None else f"shuffled: --shuffle {seed}"


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder) and item.path.relative_to(folder).parts[0] in LONG:
            item.add_marker(pytest.mark.long)
        if IS_COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip("replaces a function of a compiled module"))
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def pytest_collection_finish() -> None:
    """The garbage collector runs from now on, and never goes over what was imported."""
    gc.freeze()
    gc.enable()


async def accept_connection(
    loop: BaseSelectorEventLoop,
    protocol: Any,
    connection: socket.socket,
    extra: Any,
    tls: Any = None,
    server: asyncio.Server | None = None,
    *others: Any,
    **named: Any,
) -> None:
    """Takes a connection as asyncio does, but closes one whose server was closed in that turn of
    the loop. asyncio forgets it, and the garbage collector finds its socket in another test."""
    if server is not None and not server.sockets:
        connection.close()
        return
    await ACCEPT(loop, protocol, connection, extra, tls, server, *others, **named)


ACCEPT = BaseSelectorEventLoop._accept_connection2
BaseSelectorEventLoop._accept_connection2 = accept_connection


def close_loop(loop: BaseSelectorEventLoop) -> None:
    """Closes a loop as asyncio does, and the connections that its servers have accepted, asyncio's
    and the router's: one whose end waits for the peer, as TLS has it, stays open else until the
    garbage collector meets it in another test. What a test itself has opened is left to the
    collector, which complains."""
    for transport in list(loop._transports.values()):
        tls_served = getattr(transport._protocol, "_server_side", False)
        if (transport._server is not None or tls_served) and transport._sock is not None:
            transport._sock.close()
            transport._sock = None
    CLOSE(loop)


CLOSE = BaseSelectorEventLoop.close
BaseSelectorEventLoop.close = close_loop


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """On compiled modules (`make compiled`), skips a test that puts something in the place of a
    method: compiled classes don't allow it."""
    try:
        return (yield)
    except AttributeError as error:
        if IS_COMPILED and str(error).endswith("is read-only") and _is_by_a_test(error):
            pytest.skip("replaces a method of a compiled class")
        raise


def _is_by_a_test(error: Exception) -> bool:
    """Whether an error was raised by a line of a test, or of pytest's monkeypatch for it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(Path(__file__).parent) or path.name == "monkeypatch.py"


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of clients that name no time limit have a minute: on a busy machine the default's 5 s,
    and a report's 1 s, may pass before a process has had its turn."""
    defaults = KvRouteClient.__init__.__kwdefaults__
    for name in ("timeout_s", "report_timeout_s"):
        monkeypatch.setitem(defaults, name, 60.0)


@pytest.fixture(autouse=True)
def logs_kept() -> Iterator[None]:
    """Puts the root logger back: commands that run in a test's process set its level and handlers,
    and a later test would miss the warnings that it waits for."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if root.level != level or root.handlers != handlers:
        root.handlers[:] = handlers
        root.setLevel(level)
