"""Every kind of port: addresses, broken handshakes, TLS, and what is not the port's protocol.

Each test with sockets runs on asyncio's loop and on uvloop, which serves in production.
"""

import asyncio
import inspect
import random
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router.net.http.bounded import BoundedHandler
from router.net.http2.sockets import Http2Protocol
from router.net.keys.certificates import Certificates
from router.net.listener import listener
from router.net.listener.connections import Place
from tests.stage.certificates import Authority, written
from tests.stage.ports import (
    GUARD_S,
    KINDS,
    TLS_KINDS,
    Port,
    a_port,
    break_a_handshake,
    client_context,
    hello,
)
from tests.stage.tcp import exchanged
from tests.stage.waiting import until

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
SUITES = (
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
)
"""Of TLS 1.2, for a certificate with an elliptic curve's key."""


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on asyncio's loop and on uvloop's."""

    @pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
    def on_loop(*, new_loop: Callable[[], asyncio.AbstractEventLoop], **about: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**about))

    own = inspect.signature(test)
    loop = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*own.parameters.values(), loop]
    on_loop.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    on_loop.__name__, on_loop.__doc__ = test.__name__, test.__doc__
    return on_loop


class Tls:
    """Files of a server, and what its clients trust."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority()
        self.certificates = Certificates(written(folder, self._authority.issue()))

    def client(self, *protocols: str) -> ssl.SSLContext:
        return client_context(self._authority.pem, *protocols)


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(tmp_path)


async def ended(port: Port, sent: bytes = b"") -> bytes:
    """All that a port sends until it closes the connection."""
    return await exchanged(port.number, sent)


# Broken handshakes


@pytest.mark.parametrize("kind", TLS_KINDS)
@pytest.mark.parametrize("seed", [1, 2])
@on_both_loops
async def test_broken_handshakes_leave_a_port_as_it_was(kind: str, seed: int, tls: Tls) -> None:
    rng = random.Random(seed)
    async with a_port(kind, certificates=tls.certificates) as port:
        good = tls.client(*port.protocols)
        assert await port.serves(good)
        for _ in range(5):
            await asyncio.gather(*(break_a_handshake(port, rng) for _ in range(16)))
            assert port.connections.open <= 64
        await until(lambda: port.connections.open == 0, f"no place is left (seed {seed})")
        assert port.connections.incomplete == 0
        assert port.connections.most_of_one == 0
        assert await port.serves(good)


@pytest.mark.parametrize("kind", ["grpc", "picker", "metrics"])
@on_both_loops
async def test_nothing_is_made_for_a_connection_before_its_handshake_is_over(
    kind: str, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    for served_by in (Http2Protocol, BoundedHandler):
        init = served_by.__init__

        def counted(*own: Any, _init: Any = init, **about: Any) -> None:
            nonlocal made
            made += 1
            _init(*own, **about)

        monkeypatch.setattr(served_by, "__init__", counted)
    rng = random.Random(3)
    async with a_port(kind, certificates=tls.certificates) as port:
        await asyncio.gather(*(break_a_handshake(port, rng) for _ in range(40)))
        await until(lambda: port.connections.open == 0, "no place is left")
        assert made == 0
        assert await port.serves(tls.client(*port.protocols))
        assert made == 1


@pytest.mark.parametrize("kind", TLS_KINDS)
@pytest.mark.parametrize("part", [0, 1, 60])
@on_both_loops
async def test_a_handshake_that_stalls_is_closed_and_counted(
    kind: str, part: int, tls: Tls
) -> None:
    async with a_port(kind, certificates=tls.certificates, begin_s=0.1) as port:
        assert await ended(port, hello(*port.protocols)[:part]) == b""
        assert +port.connections.closed == {"slow_head": 1}
        assert port.connections.open == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [1, 4, 17])
@on_both_loops
async def test_a_first_request_that_stalls_is_closed_and_counted(kind: str, part: int) -> None:
    async with a_port(kind, begin_s=0.1) as port:
        await ended(port, port.request[:part])
        assert +port.connections.closed == {"slow_head": 1}
        await until(lambda: port.connections.open == 0, "its place is free")


@pytest.mark.parametrize("kind", TLS_KINDS)
@on_both_loops
async def test_many_that_stall_make_room_for_a_good_client(kind: str, tls: Tls) -> None:
    async with a_port(kind, certificates=tls.certificates, connections_max=8) as port:
        rng = random.Random(5)
        stalled = []
        for _ in range(30):
            part = hello(*port.protocols)[: rng.choice((0, 1, 60))]
            stalled.append(await asyncio.open_connection("127.0.0.1", port.number))
            stalled[-1][1].write(part)
        assert await port.serves(tls.client(*port.protocols))
        assert port.connections.open <= 8
        for _, writer in stalled:
            writer.transport.abort()


# What is not the port's protocol


@pytest.mark.parametrize("kind", TLS_KINDS)
@on_both_loops
async def test_plain_http_to_a_port_with_tls_gets_a_400_that_says_so(
    kind: str, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_port(kind, certificates=tls.certificates) as port:
        for method in (b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"):
            body = bytes(200_000)
            head = method + b" / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n"
            answer = await ended(port, head + body)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"\r\n\r\nthis port speaks TLS\n")
        assert +port.connections.closed == {"tls": 6}
        await until(lambda: port.connections.open == 0, "no place is left")
    (line,) = [record for record in caplog.records if "speaks TLS" in record.getMessage()]
    assert f"port {kind}: 127.0.0.1:" in line.getMessage()


@pytest.mark.parametrize("kind", TLS_KINDS)
@on_both_loops
async def test_plain_http2_to_a_port_with_tls_is_closed_with_a_line_in_the_log(
    kind: str, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_port(kind, certificates=tls.certificates) as port:
        assert await ended(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == b""
        assert +port.connections.closed == {"tls": 1}
    assert "sends plain text, but this port speaks TLS" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@on_both_loops
async def test_tls_to_a_port_without_it_is_closed_with_a_line_in_the_log(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_port(kind) as port:
        for _ in range(3):
            with pytest.raises(ConnectionResetError):  # its hello stays unread
                await ended(port, hello())
        assert +port.connections.closed == {"tls": 3}
        assert await port.serves()
    assert caplog.text.count("begins TLS, but this port speaks plain text") == 1


@pytest.mark.parametrize("kind", ["grpc", "picker"])
@pytest.mark.parametrize("protocols", [(), ("http/1.1",), ("h2c", "spdy/3")])
@on_both_loops
async def test_tls_that_has_not_agreed_on_http2_is_closed(
    kind: str, protocols: tuple[str, ...], tls: Tls
) -> None:
    async with a_port(kind, certificates=tls.certificates) as port:
        assert not await port.serves(tls.client(*protocols))
        assert +port.connections.closed == {"tls": 1}
        assert await port.serves(tls.client(*protocols, "h2"))


@pytest.mark.parametrize("kind", TLS_KINDS)
@on_both_loops
async def test_tls_takes_suites_with_aead_and_ecdhe_only(kind: str, tls: Tls) -> None:
    async with a_port(kind, certificates=tls.certificates) as port:

        async def takes(suite: str) -> bool:
            context = tls.client(*port.protocols)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers(suite)
            return await port.serves(context)

        every = tls.client()
        every.set_ciphers("ALL")
        for about in every.get_ciphers():
            suite = about["name"]
            if about["protocol"] != "TLSv1.3" and not {"PSK", "SRP"} & set(suite.split("-")):
                assert await takes(suite) == (suite in SUITES), suite
        assert await port.serves(tls.client(*port.protocols)), "TLS 1.3"


# Addresses and bounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listen", ["[::]:0", ":0"])
@on_both_loops
async def test_every_address_is_of_both_families(kind: str, listen: str) -> None:
    async with a_port(kind, listen=listen) as port:
        for host in ("127.0.0.1", "::1"):
            assert await port.serves(host=host), host


@pytest.mark.parametrize("kind", KINDS)
@on_both_loops
async def test_a_host_without_ipv6_serves_ipv4(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(socket.socket):
        def __init__(self, family: int = -1, *more: Any, **about: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family, *more, **about)

    monkeypatch.setattr(socket, "socket", Without)
    async with a_port(kind, listen="[::]:0") as port:
        assert await port.serves()


@pytest.mark.parametrize("kind", KINDS)
@on_both_loops
async def test_one_client_never_takes_all_of_a_port(kind: str) -> None:
    async with a_port(kind, connections_max=16) as port:
        taken = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
            writer.write(port.request)
            await reader.read(1)
            taken.append(writer)
        assert port.connections.open == port.connections.most_of_one == 14
        assert +port.connections.closed == {"address": 6}
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port.number, local_addr=("127.0.0.2", 0)
        )
        writer.write(port.request)
        assert await reader.read(1)
        for each in (*taken, writer):
            each.transport.abort()
        await until(lambda: port.connections.open == 0, "all places are free")


def idle(place: Place) -> bool:
    return place.served_by is not None and place.served_by.idle


@pytest.mark.parametrize("kind", KINDS)
@on_both_loops
async def test_idle_connections_make_room_on_a_full_port(kind: str) -> None:
    async with a_port(kind, connections_max=4) as port:
        opened = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
            writer.write(port.request)
            assert await reader.read(1)
            opened.append((reader, writer))
        assert port.connections.open == 4
        assert +port.connections.closed == {"full": 6}
        for reader, _ in opened[:6]:
            await asyncio.wait_for(reader.read(), GUARD_S)  # to its end
        for _, writer in opened:
            writer.transport.abort()


@on_both_loops
async def test_a_client_has_its_own_bound_and_its_end_gives_its_places_back() -> None:
    async with a_port("metrics", connections_max=8) as port:
        for _ in range(9):
            assert await port.serves()
            await until(lambda: port.connections.open == 0, "its place is free")
        taken = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(7)]
        for reader, writer in taken:
            writer.write(port.request)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(port.request[:9])  # of the next request: it is not idle
        await until(lambda: not any(map(idle, port.connections._begun)), "all are busy")
        assert not await port.serves()
        for _, writer in taken:
            writer.transport.abort()
        await until(lambda: port.connections.open == 0, "their places are free")
        assert await port.serves()


@on_both_loops
async def test_a_port_without_file_descriptors_accepts_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "NO_DESCRIPTORS_S", 0.01)
    accept = socket.socket.accept
    failures = iter([OSError(24, "Too many open files")] * 5)

    def failing(own: socket.socket) -> Any:
        for failure in failures:
            raise failure
        return accept(own)

    async with a_port("metrics") as port:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert await port.serves()
    assert caplog.text.count("Too many open files") == 1


@on_both_loops
async def test_a_silent_connection_makes_room_on_a_host_without_file_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def failing(own: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(own)

    async with a_port("metrics") as port:
        silent, writer = await asyncio.open_connection("127.0.0.1", port.number)
        await until(lambda: port.connections.open == 1, "it is accepted")
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert await port.serves()
        assert await silent.read() == b""
        assert +port.connections.closed == {"full": 1}
        writer.close()


@on_both_loops
async def test_a_turn_accepts_and_begins_few_connections(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0
    accepted, begun = Counter[int](), Counter[int]()
    admit, serve = listener.Listener._admit, listener.Listener._serve

    def admitted(own: Any, *about: Any) -> None:
        accepted[turn] += 1
        admit(own, *about)

    def served(own: Any, *about: Any) -> Any:
        begun[turn] += 1
        return serve(own, *about)

    monkeypatch.setattr(listener.Listener, "_admit", admitted)
    monkeypatch.setattr(listener.Listener, "_serve", served)
    loop = asyncio.get_running_loop()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    async with a_port("metrics", certificates=tls.certificates) as port:
        next_turn()
        clients = [socket.create_connection(("127.0.0.1", port.number)) for _ in range(50)]
        for client in clients:
            client.sendall(hello())
        await until(lambda: sum(begun.values()) == 50, "all have begun")
        for client in clients:
            client.close()
        await until(lambda: port.connections.open == 0, "all are over")
    assert max(accepted.values()) <= listener.ACCEPTED_TURN
    assert max(begun.values()) <= listener.HANDSHAKES_TURN
