"""The connection to NATS over real sockets: how it is lost, how soon that shows, how it returns."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from nats.aio.msg import Msg
from nats.errors import SlowConsumerError

from events.plane import broker as module
from events.plane import nats_client
from events.plane.broker import Broker
from events.plane.nats_wire import Frames
from events.plane.settings import NatsSettings
from router.cluster.children.nats_server import NatsChild
from tests.stage.loopback import a_nats
from tests.stage.nats_server import nats_server
from tests.stage.proxy import Proxy, proxy_to
from tests.stage.tcp import tcp_server
from tests.stage.waiting import until

DEFAULT_ATTEMPTS = 60
"""After which nats-py gives up, unless told otherwise."""


class Ear:
    """What one subscription heard, and what was told of the connection."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.connections: list[bool] = []

    async def __call__(self, message: Msg) -> None:
        self.heard.append(message.data)


@asynccontextmanager
async def connected(
    url: str, settings: NatsSettings | None = None
) -> AsyncIterator[tuple[Broker, Ear]]:
    broker = Broker(settings or NatsSettings(), url, "test")
    ear = Ear()
    broker.on_connection(ear.connections.append)
    try:
        await broker.connect()

        async def listen(message: Msg) -> None:
            await ear(message)

        await broker.subscribe("a", listen)
        yield broker, ear
    finally:
        await broker.close()


@asynccontextmanager
async def through_a_proxy() -> AsyncIterator[tuple[Proxy, Broker, Ear]]:
    async with (
        a_nats() as nats,
        proxy_to(port_of(nats)) as proxy,
        connected(f"nats://127.0.0.1:{proxy.port}") as (broker, ear),
    ):
        yield proxy, broker, ear


def port_of(nats: NatsChild) -> int:
    return int(nats.url.rpartition(":")[2])


async def test_a_server_that_is_away_for_longer_than_nats_py_tries_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RECONNECT_WAIT_S", 0.005)
    async with through_a_proxy() as (proxy, broker, ear):
        proxy.cut()
        await until(
            lambda: broker.counts["error"] > DEFAULT_ATTEMPTS + 10, "more attempts than enough"
        )
        assert not broker.connected
        assert ear.connections == [True, False]
        assert not await broker.publish("a", b"lost")
        assert broker.counts["not_connected"] == 1
        await proxy.heal()
        await until(lambda: ear.connections == [True, False, True], "the server again")
        assert await broker.publish("a", b"found")
        await until(lambda: ear.heard == [b"found"], "the subscription to work again")


@pytest.mark.parametrize("unsent_bytes", [0, 16 << 20])
async def test_a_connection_on_which_nothing_comes_is_found_out_by_pings(
    unsent_bytes: int,
) -> None:
    """With bytes that the peer doesn't take, too: nobody waits until they are written, nor for the
    kernel, which gives a connection up after minutes."""
    async with through_a_proxy() as (proxy, broker, ear):
        proxy.stall()
        sending = asyncio.create_task(flood(broker, unsent_bytes))
        await until(lambda: ear.connections == [True, False], "the loss to be noticed")
        await asyncio.wait_for(sending, 60.0)
        await proxy.heal()
        await until(lambda: broker.connected, "the server again")
        await broker.publish("a", b"found")
        await until(lambda: ear.heard[-1:] == [b"found"], "the subscription to work again")


async def flood(broker: Broker, size: int) -> None:
    for _ in range(size >> 16):
        await broker.publish("b", bytes(1 << 16))


async def test_closing_does_not_wait_for_a_server_that_takes_nothing() -> None:
    loop = asyncio.get_running_loop()
    async with through_a_proxy() as (proxy, broker, _):
        proxy.stall()
        sending = asyncio.create_task(flood(broker, 16 << 20))
        await until(lambda: broker._client.pending_data_size > 1 << 20, "unsent bytes")
        began_s = loop.time()
        await broker.close()
        assert loop.time() - began_s < module._CLOSE_S + 3.0
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_attempts_that_get_no_answer_end_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CONNECT_S", 0.05)
    monkeypatch.setattr(module, "_RECONNECT_WAIT_S", 0.005)
    async with a_nats() as nats, proxy_to(port_of(nats)) as proxy:
        proxy.stall()
        broker = Broker(NatsSettings(), f"nats://127.0.0.1:{proxy.port}", "test")
        connecting = asyncio.create_task(broker.connect())
        await until(lambda: proxy.taken > 3, "attempts at a first connection")
        assert established_to(proxy.port) <= 2
        await proxy.heal()
        await asyncio.wait_for(connecting, 60.0)
        proxy.stall()
        before = proxy.taken
        await until(lambda: proxy.taken > before + 5, "attempts at another connection")
        assert established_to(proxy.port) <= 2
        await proxy.heal()
        await until(lambda: broker.connected, "the server again")
        await broker.close()


def established_to(port: int) -> int:
    """Connections of this machine to a loopback port that our side has not ended."""
    rows = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    found = [row.split()[2:4] for row in rows]
    return sum(remote.endswith(f":{port:04X}") and state == "01" for remote, state in found)


async def test_a_server_that_no_longer_lets_us_in_is_asked_until_it_does(tmp_path: Path) -> None:
    def users(password: str) -> str:
        return f"authorization {{ users = [{{ user: a, password: {password} }}] }}"

    settings = NatsSettings(user="a", password="right")
    async with (
        nats_server(tmp_path, users("right")) as server,
        connected(server.url, settings) as (broker, ear),
    ):
        server.write(users("another"))
        await server.reload()
        await until(lambda: ear.connections == [True, False], "the door to close")
        await until(lambda: broker.counts["error"] >= 2, "an attempt that is turned down")
        server.write(users("right"))
        await server.reload()
        await until(lambda: ear.connections == [True, False, True], "the door to open")
        await broker.publish("a", b"in")
        await until(lambda: ear.heard == [b"in"], "the subscription to work again")


async def test_losses_are_told_once_a_second_at_most_and_each_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(NatsSettings(), "nats://127.0.0.1:1", "test")
    told: list[bool] = []
    broker.on_connection(told.append)
    lost = SlowConsumerError("a", "", 1, None)  # type: ignore[arg-type]
    for _ in range(100):  # one for each message
        await broker._on_error(lost)
    assert told == [False, True]
    assert broker.counts["slow_consumer"] == 100
    monkeypatch.setattr(module, "LOSS_S", 0.0)
    await broker._on_error(lost)
    assert told == [False, True, False, True]


async def test_a_server_too_busy_for_pongs_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pongs stand behind all that it has to send us."""
    monkeypatch.setattr(nats_client, "PING_S", 0.02)
    pings = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal pings
        writer.write(b'INFO {"max_payload":1048576}\r\n')
        try:
            await reader.readline()  # CONNECT
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    pings += 1
                    writer.write(b"PONG\r\n" if pings <= 2 else b"MSG a 1 1\r\nx\r\n")
        finally:
            writer.transport.abort()

    async with tcp_server(serve) as port, connected(f"nats://127.0.0.1:{port}") as (_, ear):
        await until(lambda: pings > 20, "many pings")
        assert ear.connections == [True]
        assert len(ear.heard) >= 15


def test_a_publish_on_a_socket_that_is_closed_is_a_loss_and_not_an_error() -> None:
    """On the routers' event loop, which raises RuntimeError where asyncio's says nothing."""

    async def scenario() -> None:
        async with a_nats() as nats, connected(nats.url) as (broker, ear):
            async with a_closed_socket(broker):
                for _ in range(4):
                    await broker.publish("b", b"")
                    await asyncio.sleep(0)  # nats-py's flusher has its turn
            await until(lambda: ear.connections == [True, False, True], "the server again")
            assert await broker.publish("a", b"found")
            await until(lambda: ear.heard[-1:] == [b"found"], "the subscription to work again")

    on_uvloop(scenario())


def test_a_ping_finds_out_that_the_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "PING_S", 0.02)
    monkeypatch.setattr(nats_client, "PINGS_MAX", 1_000_000)

    async def scenario() -> None:
        async with a_nats() as nats, connected(nats.url) as (broker, ear):
            async with a_closed_socket(broker):
                await until(lambda: ear.connections == [True, False], "the loss to be noticed")
            await until(lambda: ear.connections == [True, False, True], "the server again")

    on_uvloop(scenario())


def test_a_broker_closes_though_its_socket_is_gone_and_bytes_are_unsent() -> None:
    async def scenario() -> None:
        async with (
            a_nats() as nats,
            connected(nats.url) as (broker, _),
            a_closed_socket(broker),
        ):
            await nats.stop()
            for _turn in range(2):
                await broker.publish("b", b"")
                await asyncio.sleep(0)
            before = broker.counts["error"]
            await broker.close()
            assert broker.counts["error"] == before + 1, "the last message is not sent"
            assert await broker.request("b", b"", 0.01) is None

    on_uvloop(scenario())


@pytest.mark.parametrize(
    "nonsense",
    [
        b"INFO []\r\n",
        b"INFO\r\n",
        b'INFO {"max_payload":1,"connect_urls":["[::1"]}\r\n',
        b'INFO {"max_payload":1,"x":"' + bytes(200_000),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b'INFO {"max_payload":1,"tls_required":true}\r\n',
    ],
    ids=["no object", "no INFO", "no addresses", "a long line", "HTTP", "TLS that fails"],
)
async def test_a_server_that_says_nonsense_at_first_is_tried_until_it_does_not(
    monkeypatch: pytest.MonkeyPatch, nonsense: bytes
) -> None:
    for pause in ("_BROKEN_S", "_RECONNECT_WAIT_S"):
        monkeypatch.setattr(module, pause, 0.005)
    monkeypatch.setattr(nats_client, "_CLOSED_S", 0.005)
    answers = [nonsense, nonsense]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if answers:
                writer.write(answers.pop())
                await reader.read(1)
                return
            writer.write(b'INFO {"max_payload":1048576}\r\n')
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        except ConnectionError:
            pass  # the client has left: what it was sent was nonsense
        finally:
            writer.transport.abort()

    async with tcp_server(serve) as port, connected(f"nats://127.0.0.1:{port}") as (broker, ear):
        assert ear.connections == [True]
        assert broker.counts["error"] >= 2


@pytest.mark.parametrize("with_the_pong", [False, True])
async def test_a_cancelled_subscribe_ends_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, with_the_pong: bool
) -> None:
    """with_the_pong: the pong comes in the same turn of the event loop as the cancellation."""
    async with a_nats() as nats, connected(nats.url) as (broker, ear):
        client = broker._client
        held, take_line = asyncio.Event(), client._process_line

        async def hold(line: bytes) -> None:
            await held.wait()
            await take_line(line)

        monkeypatch.setattr(client, "_process_line", hold)
        subscriptions, pongs = len(client._subs), client._pongs_received
        subscribing = asyncio.create_task(broker.subscribe("b", ear))
        await until(lambda: client._pongs, "the subscription to wait for its pong")
        if with_the_pong:
            client._pongs[0].set_result(True)
        subscribing.cancel()
        await asyncio.wait([subscribing])
        held.set()
        assert subscribing.cancelled()
        assert len(client._subs) == subscriptions
        await until(lambda: client._pongs_received > pongs, "the pong of a flush that is over")
        await broker.subscribe("c", ear)  # whose flush has its own pong
        assert ear.connections == [True]
        assert broker.counts["error"] == 0


async def test_a_request_whose_answer_comes_with_its_cancellation_is_cancelled() -> None:
    async with a_nats() as nats, connected(nats.url) as (broker, _):
        client = broker._client
        await client.subscribe("b")  # a listener that does not answer
        asking = asyncio.create_task(broker.request("b", b"", 10.0))
        await until(lambda: client._resp_map, "the request to wait for its answer")
        (answer,) = client._resp_map.values()
        answer.set_result(Msg(client))
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()


@pytest.mark.parametrize("error", [RuntimeError("closed"), AttributeError("no transport")])
async def test_what_nats_py_lets_through_costs_one_message_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with a_nats() as nats, connected(nats.url) as (broker, _):

        async def raises(*_parts: object, **_options: object) -> None:
            raise error

        client = broker._client
        subscription = await client.subscribe("c")
        monkeypatch.setattr(client, "_send_command", raises)
        assert not await broker.publish("a", b"")
        assert await broker.request("a", b"", 1.0) is None
        await broker.unsubscribe(subscription)
        assert broker.counts["error"] == 3


@asynccontextmanager
async def a_closed_socket(broker: Broker) -> AsyncIterator[None]:
    """The socket is closed while the client's reader is at work on what came before, so that
    nobody has noticed yet."""
    client = broker._client
    held, done = asyncio.Event(), asyncio.Event()

    async def busy(_frames: Frames, _data: bytes) -> None:
        held.set()
        await done.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_take", busy)
        await broker.publish("a", b"before")
        await held.wait()
        client.abort()
        await client._transport.wait_closed()
        assert broker.connected, "as far as the client knows"
        yield
        done.set()


def on_uvloop(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario, 30.0))
