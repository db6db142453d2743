"""The embedded NATS server: who it takes, and that it is always there again."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from events.plane.broker import Broker
from events.plane.settings import NatsSettings
from router.cluster.children import nats_server as module
from router.cluster.children.nats_server import NatsChild
from tests.stage.loopback import router_app, serve_config
from tests.stage.waiting import until

PASSWORD = "a-password-of-its-own"


@asynccontextmanager
async def a_nats(password: str = "") -> AsyncIterator[NatsChild]:
    nats = NatsChild(password)
    keeping = None
    try:
        await nats.start()
        keeping = asyncio.create_task(nats.keep())
        yield nats
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await nats.stop()


async def greeted(nats: NatsChild, connect: bytes) -> bytes:
    """What the server answers to this, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(nats))
    await reader.readline()
    writer.write(connect + b"\r\nPING\r\n")
    answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer


def port_of(nats: NatsChild) -> int:
    return int(nats.url.rpartition(":")[2])


async def test_a_server_with_a_password_takes_nobody_without_it() -> None:
    async with a_nats(PASSWORD) as nats:
        assert b"Authorization Violation" in await greeted(nats, b"CONNECT {}")
        wrong = b'CONNECT {"user":"kvroute","pass":"x"}'
        assert b"Authorization Violation" in await greeted(nats, wrong)
        assert nats.settings().url == nats.url
        broker = Broker(nats.settings(), nats.url, "ours")
        await broker.connect()
        assert broker.connected
        await broker.close()
    async with a_nats() as nats:
        assert await greeted(nats, b'CONNECT {"verbose":false}') == b"PONG\r\n"
        assert nats.settings() == NatsSettings(url=nats.url)


async def test_refusals_without_end_fill_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 4096)
    async with a_nats(PASSWORD) as nats:
        for _ in range(200):
            assert b"Authorization Violation" in await greeted(nats, b"CONNECT {}")
        assert 0 < logged_bytes(Path(nats._folder.name)) < 3 * 4096


def logged_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("log*"))


async def test_the_password_is_in_one_file_that_only_we_can_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_nats(PASSWORD) as nats:
        folder = Path(nats._folder.name)
        assert modes(folder, PASSWORD) == {"": 0o700, "nats.conf": 0o600}
        assert not any(PASSWORD.encode() in one for one in shown(nats.pid))
        assert PASSWORD not in nats.url + repr(nats) + caplog.text
    assert modes(folder, PASSWORD) == {}


def modes(folder: Path, text: str) -> dict[str, int]:
    """Rights of a folder, and of its files that hold a text."""
    if not folder.exists():
        return {}
    found = {file.name: file for file in folder.iterdir() if text in file.read_text()}
    return {name: one.stat().st_mode & 0o777 for name, one in {"": folder, **found}.items()}


def shown(pid: int | None) -> list[bytes]:
    """What others may see of a process: its command line; its environment, if they are its user."""
    return [Path(f"/proc/{pid}/{said}").read_bytes() for said in ("cmdline", "environ")]


async def test_a_server_that_left_is_started_again_on_its_port_however_long_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    async with a_nats(PASSWORD) as nats:
        url, pid = nats.url, nats.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that the port can be taken before it is listened on again
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: bound(other, port_of(nats)), "the port")
            await until(
                lambda: caplog.text.count("can't be started, to be retried") >= 3, "attempts"
            )
            assert nats.restarts == 0
        await until(lambda: nats.restarts == 1, "the server on its port again")
        assert nats.url == url
        assert nats.pid != pid
        wrong = b'CONNECT {"user":"kvroute","pass":"x"}'
        assert b"Authorization Violation" in await greeted(nats, wrong)


def bound(other: socket.socket, port: int) -> bool:
    try:
        other.bind(("127.0.0.1", port))
    except OSError:
        return False
    other.listen()
    return True


KILLS = int(os.environ.get("KVROUTE_TEST_NATS_KILLS", "3"))


# A connection on which the server dies before it says its first word is dropped by nats-py without
# being closed, and closed by the interpreter, which complains.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter.__del__"
    ":pytest.PytestUnraisableExceptionWarning"
)
async def test_a_server_that_is_killed_under_grpc_traffic_comes_back_each_time() -> None:
    """KVROUTE_TEST_NATS_KILLS=50 for more of it."""
    async with router_app(serve_config(None)) as (app, client):
        nats, broker = app.links.child, app.links.broker
        assert nats is not None
        assert broker is not None
        await until(lambda: broker.connected, "the first connection")
        calls = 0

        async def call() -> None:
            nonlocal calls
            while True:
                await client.list_workers()
                calls += 1

        traffic = [asyncio.create_task(call()) for _ in range(4)]
        for kill in range(1, KILLS + 1):
            before, pid = calls, nats.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda kill=kill: nats.restarts == kill, "the server again")
            await until(lambda: broker.connected, "the connection again")
            await until(lambda before=before: calls > before, "calls to go on")
        for one in traffic:
            one.cancel()
        await asyncio.gather(*traffic, return_exceptions=True)
        text = app.metrics.registry.get_sample_value(
            "kvroute_failures_total", {"what": "nats", "kind": "", "policy": ""}
        )
        assert text == KILLS
