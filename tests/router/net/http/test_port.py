"""The bounds of an HTTP port, each at the bound, and its certificates."""

import asyncio
import gzip
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from router.config.keys import ConfigError
from router.config.settings.serving_settings import HttpSettings
from router.net.http.bounded import HEAD_TIMES, BoundedHandler
from router.net.http.port import HttpPort
from router.net.keys.certificates import Certificates, Contexts
from router.net.keys.exposure import split_address
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.families import export
from router.observe.metrics.of_http import http_metrics
from router.observe.metrics.ports import MetricsServer, ProbeServer
from tests.stage.certificates import Authority, written
from tests.stage.waiting import until

GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Answer = Callable[[web.Request], Awaitable[web.Response]]
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_opened: list[asyncio.StreamWriter] = []
"""Clients of the test that runs."""


async def here(_request: web.Request) -> web.Response:
    return web.Response(text="here")


@asynccontextmanager
async def a_port(
    *, tls: Contexts | None = None, answer: Answer = here, **bounds: float
) -> AsyncIterator[HttpPort]:
    app = web.Application()
    app.router.add_route("*", "/", answer)
    settings = HttpBounds(**bounds)  # type: ignore[arg-type]
    port = HttpPort(
        app, "127.0.0.1:0", name="metrics", bounds=settings, tls=tls, shutdown_timeout_s=0.1
    )
    await port.start()
    try:
        yield port
    finally:
        await port.stop()
        await until(lambda: port.connections.open == 0, "nothing is left open")
        for writer in _opened:
            writer.transport.abort()
        await asyncio.gather(*(w.wait_closed() for w in _opened), return_exceptions=True)
        _opened.clear()


async def connected(port: HttpPort, context: ssl.SSLContext | None = None) -> Peer:
    peer = await asyncio.open_connection("127.0.0.1", port.port, ssl=context)
    _opened.append(peer[1])
    return peer


async def answered(peer: Peer, request: bytes = HEAD) -> bool:
    """Whether a request on an open connection gets its answer."""
    peer[1].write(request)
    return (await asyncio.wait_for(peer[0].readuntil(b"here"), GUARD_S)).startswith(b"HTTP/1.1 200")


async def ended(peer: Peer) -> bytes:
    """All that comes until the connection's end."""
    try:
        return await asyncio.wait_for(peer[0].read(), GUARD_S)
    except ConnectionError:
        return b""


@asynccontextmanager
async def dripping(peer: Peer) -> AsyncIterator[None]:
    """A head that never ends comes byte by byte."""

    async def drip() -> None:
        peer[1].write(HEAD[:20])
        while True:
            peer[1].write(b"a")
            await asyncio.sleep(0.01)

    task = asyncio.create_task(drip())
    try:
        yield
    finally:
        task.cancel()


async def test_a_head_that_drips_is_closed_and_counted() -> None:
    async with a_port(head_timeout_s=0.5) as port:
        slow = await connected(port)
        async with dripping(slow):
            assert await ended(slow) == b""
        assert port.connections.closed["slow_head"] == 1
        assert await answered(await connected(port))


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with a_port(head_timeout_s=0.1) as port:
        assert await ended(await connected(port)) == b""
        assert +port.connections.closed == {"slow_head": 1}


async def test_the_head_of_a_later_request_has_the_same_time() -> None:
    async with a_port(head_timeout_s=0.5) as port:
        kept = await connected(port)
        assert await answered(kept)
        async with dripping(kept):
            assert await ended(kept) == b""
        assert port.connections.closed["slow_head"] == 1
        assert port.connections.closed["idle"] == 0


async def test_a_head_in_pieces_is_served_and_the_connection_stays() -> None:
    async with a_port(head_timeout_s=GUARD_S) as port:
        peer = await connected(port)
        for at in range(len(HEAD) - 1):
            peer[1].write(HEAD[at : at + 1])
            await asyncio.sleep(0)
        assert await answered(peer, HEAD[-1:])
        assert await answered(peer)


async def test_a_connection_without_requests_is_closed_after_its_time() -> None:
    async with a_port(idle_timeout_s=0.2) as port:
        kept = await connected(port)
        assert await answered(kept)
        assert await ended(kept) == b""
        assert +port.connections.closed == {"idle": 1}


async def test_the_connection_past_the_bound_is_closed_and_the_next_has_its_place() -> None:
    async with a_port(connections_max=2) as port:
        first, second = await connected(port), await connected(port)
        assert await answered(first)
        assert await answered(second)
        for _, writer in (first, second):
            writer.write(HEAD[:9])  # no idle connection makes room
        busy = port.connections._begun
        await until(lambda: not any(place.served_by.idle for place in busy), "both are busy")
        third = await connected(port)
        assert await ended(third) == b""
        assert port.connections.closed["full"] == 1
        assert await answered(first, HEAD[9:]), "open ones go on"
        registry = CollectorRegistry()
        export(registry, http_metrics, port.connections)
        labels = {"port": "metrics", "kind": "open"}
        assert registry.get_sample_value("kvroute_http_connections", labels) == 2
        labels = {"port": "metrics", "reason": "full"}
        assert registry.get_sample_value("kvroute_http_connections_closed_total", labels) == 1
        second[1].close()
        await until(lambda: port.connections.open == 1, "the end is noticed")
        assert await answered(await connected(port))


@pytest.mark.parametrize("rest", [b"\xff\xfe\r\n\r\n", b"X-A: " + b"a" * 20_000 + b"\r\n\r\n"])
async def test_what_is_no_head_is_refused_without_an_echo_or_a_line_in_the_log(
    rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_port() as port:
        peer = await connected(port)
        peer[1].write(b"GET / HTTP/1.1\r\n" + rest)
        answer = await ended(peer)
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.0 431 "))
        assert answer.endswith(b"\r\n\r\nmalformed request\n")
        assert port.connections.closed["malformed"] == 1
        assert not caplog.records


async def test_a_body_that_does_not_come_holds_its_connection_for_the_linger_time_alone() -> None:
    async with a_port(linger_s=0.1) as port:
        peer = await connected(port)
        assert await answered(peer, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1")
        assert await asyncio.wait_for(peer[0].read(), 9.0) == b""


async def endless(request: web.Request) -> web.Response:
    """An answer that goes on as long as its client takes it."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(1 << 16))


async def test_a_client_that_takes_nothing_of_an_answer_is_closed() -> None:
    async with a_port(answer=endless, read_s=0.05) as port:
        (_, writer) = await connected(port)
        writer.transport.pause_reading()
        writer.write(HEAD)
        await until(lambda: port.connections.open == 0, "its place is free")
        assert +port.connections.closed == {"unread": 1}


async def long(request: web.Request) -> web.Response:
    """An answer of which a client that takes nothing leaves a part in the transport, however much
    the kernel holds; the transport never asks to pause for it."""
    assert request.transport is not None
    request.transport.set_write_buffer_limits(1 << 30)
    return web.Response(body=bytes(1 << 25))


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
async def test_a_rest_that_pauses_nothing_holds_its_connection_for_read_s_alone(more: str) -> None:
    async with a_port(answer=long, read_s=0.05, idle_timeout_s=0.05) as port:
        (_, writer) = await connected(port)
        writer.transport.pause_reading()
        writer.write(f"GET / HTTP/1.1\r\nHost: a\r\n{more}\r\n".encode())
        await until(lambda: port.connections.open == 0, "its place is free")
        assert port.connections.closed["unread"] == 1


async def test_a_client_that_takes_some_of_an_answer_is_not_closed() -> None:
    async with a_port(answer=endless, read_s=1e6) as port:
        (reader, writer) = await connected(port)
        writer.write(HEAD)
        await reader.readuntil(b"\r\n\r\n")
        assert port._runner.server is not None
        (connection,) = port._runner.server.connections
        assert isinstance(connection, BoundedHandler)
        await until(lambda: connection.writing_paused, "the answer waits for its client")
        while connection._unread >= 0:
            await reader.read(1 << 16)
        await until(lambda: connection.writing_paused, "it waits again")
        connection._look_for_reader()
        assert connection.transport is not None
        assert not connection.transport.is_closing()
        connection._unread = connection.transport.get_write_buffer_size()
        connection._look_for_reader()
        assert +port.connections.closed == {"unread": 1}


async def test_the_end_of_a_port_ends_its_connections() -> None:
    async with a_port() as port:
        idle, served = await connected(port), await connected(port)
        assert await answered(served)
        await until(lambda: port.connections.open == 2, "both are open")
        await port.stop()
        assert await ended(idle) == b""
        assert await ended(served) == b""


async def test_answers_do_not_tell_what_the_server_is_made_of() -> None:
    async with a_port() as port:
        peer = await connected(port)
        peer[1].write(HEAD)
        answer = await asyncio.wait_for(peer[0].readuntil(b"here"), GUARD_S)
        assert b"\r\nServer: kvroute\r\n" in answer
        assert b"aiohttp" not in answer


async def test_an_address_that_is_taken_is_named() -> None:
    async with a_port() as port:
        taken = HttpPort(
            web.Application(), f"127.0.0.1:{port.port}", name="probes", bounds=HttpBounds()
        )
        with pytest.raises(ConfigError, match=r"can't serve probes .* at `\$\.probes\.listen`"):
            await taken.start()


@pytest.mark.parametrize("address", ["here", "a:b", ":65536"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        split_address(address)


# TLS


def caller(server: Authority, pair: tuple[bytes, bytes], folder: Path) -> ssl.SSLContext:
    """Of a client, with its certificate."""
    (folder / "c.crt").write_bytes(pair[0])
    (folder / "c.key").write_bytes(pair[1])
    context = ssl.create_default_context(cadata=server.pem.decode())
    context.load_cert_chain(folder / "c.crt", folder / "c.key")
    return context


async def is_refused(port: HttpPort, context: ssl.SSLContext) -> bool:
    """Whether a new connection is; in TLS 1.3 a client learns it after the handshake."""
    try:
        peer = await connected(port, context)
        return not await answered(peer)
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        return True


async def test_a_ca_that_left_its_file_counts_for_no_new_connection(tmp_path: Path) -> None:
    server, old, new = Authority("server"), Authority("old"), Authority("new")
    certificates = Certificates(written(tmp_path, server.issue(), old))
    before = caller(server, old.issue("scraper"), tmp_path)
    after = caller(server, new.issue("scraper"), tmp_path)
    async with a_port(tls=certificates.contexts(ssl.CERT_REQUIRED)) as port:
        kept = await connected(port, before)
        assert await answered(kept)
        assert await is_refused(port, after)
        (tmp_path / "ca.crt").write_bytes(new.pem)
        assert certificates.reload()
        assert await answered(kept), "an open connection goes on"
        assert await answered(await connected(port, after))
        assert await is_refused(port, before)


async def test_a_session_is_not_resumed_past_a_change_of_the_ca(tmp_path: Path) -> None:
    server, old, new = Authority("server"), Authority("old"), Authority("new")
    certificates = Certificates(written(tmp_path, server.issue(), old))
    context = caller(server, old.issue("scraper"), tmp_path)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # its session is known after the handshake
    async with a_port(tls=certificates.contexts(ssl.CERT_REQUIRED)) as port:

        def handshake(session: ssl.SSLSession | None) -> ssl.SSLSession:
            with (
                socket.create_connection(("127.0.0.1", port.port), timeout=GUARD_S) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as wrapped,
            ):
                assert wrapped.session_reused is (session is not None)
                assert wrapped.session is not None
                return wrapped.session

        session = await asyncio.to_thread(handshake, None)
        await asyncio.to_thread(handshake, session)
        (tmp_path / "ca.crt").write_bytes(new.pem)
        assert certificates.reload()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(handshake, session)


async def test_a_handshake_that_does_not_come_is_counted_and_closed(tmp_path: Path) -> None:
    certificates = Certificates(written(tmp_path, Authority().issue()))
    bounds = {"head_timeout_s": 0.5, "connections_max": 1}
    async with a_port(tls=certificates.contexts(), **bounds) as port:
        first = await connected(port)
        await until(lambda: port.connections.open == 1, "it counts before its handshake")
        silent = await connected(port)
        assert await ended(first) == b"", "it makes room"
        assert port.connections.closed["full"] == 1
        assert await ended(silent) == b""
        assert port.connections.closed["slow_head"] == 1
        assert port.connections.open == 0, "its place is free"


@pytest.mark.parametrize("seed", range(5))
async def test_a_head_that_does_not_end_has_a_bound(seed: int) -> None:
    rng = random.Random(seed)
    async with a_port() as port:
        peer = await connected(port)
        if rng.random() < 0.5:
            assert await answered(peer)
        came = b"GET / HTTP/1.1\r\n"
        for number in range(100):
            came += b"X-%d: %s\r\n" % (number, b"a" * rng.randrange(2000))
        assert len(came) > HEAD_TIMES * 8190
        for start in range(0, len(came), size := rng.randrange(100, 9000)):
            peer[1].write(came[start : start + size])
        answer = await ended(peer)  # lost, if bytes come after the end
        assert not answer or answer.split()[1] == b"431"
        await until(lambda: port.connections.open == 0, "the connection is closed")
        assert port.connections.closed["malformed"] == 1
        assert await answered(await connected(port))


async def test_a_body_is_handed_on_as_it_came() -> None:
    packed = gzip.compress(bytes(1 << 20))
    bodies: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(text="here")

    async with a_port(answer=answer) as port:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        assert await answered(await connected(port), head % len(packed) + packed)
        assert bodies == [packed]


async def test_the_rest_of_an_answered_requests_body_has_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.net.http.bounded.REST_BYTES_MAX", 1 << 20)
    tiny = b"1\r\n \r\n"
    async with a_port(linger_s=GUARD_S) as port:
        for size, closes in ((b"Content-Length: 32768", False), (b"Content-Length: 4194304", True),
                             (b"Transfer-Encoding: chunked", True)):  # fmt: skip
            reader, writer = await connected(port)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n" + size + b"\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"here"), GUARD_S)
            assert (b"Connection: close" in head) == closes
            writer.write(tiny * 700_000 if closes else b"x" * 32_768)
            if closes:
                assert await ended((reader, writer)) == b""
            else:
                assert await answered((reader, writer))


async def test_chunks_of_a_byte_come_some_at_a_time() -> None:
    sizes: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        while chunk := await request.content.readany():
            sizes.append(len(chunk))
        return web.Response(text="here")

    async with a_port(answer=answer) as port:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        body = b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"
        assert await answered(await connected(port), head + body)
    assert sum(sizes) == 100_000
    assert max(sizes) < 1100


@pytest.mark.parametrize("seed", range(4))
async def test_a_body_in_any_chunks_arrives_whole(seed: int) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(400_000)
    bodies: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        body = b""
        while chunk := await request.content.readany():
            body += chunk
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        bodies.append(body)
        return web.Response(text="here")

    async with a_port(answer=answer) as port:
        peer = await connected(port)
        for _ in range(3):
            head = b"POST / HTTP/1.1\r\nHost: a\r\n"
            if rng.random() < 0.3:
                data = b"%sContent-Length: %d\r\n\r\n%s" % (head, len(content), content)
            else:
                data, at = head + b"Transfer-Encoding: chunked\r\n\r\n", 0
                while at < len(content):
                    part = content[at : at + rng.choice((1, 2, 100, 5000, 70_000))]
                    data += b"%x\r\n%s\r\n" % (len(part), part)
                    at += len(part)
                data += b"0\r\n\r\n"
            places = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(9))})
            for start, end in pairwise(places[:-1]):
                peer[1].write(data[start:end])
                await asyncio.sleep(0)
            assert await answered(peer, data[places[-2] :])
    assert bodies == [content] * 3


async def test_connections_without_a_request_are_closed_on_demand() -> None:
    async with a_port() as port:
        idle, new, begun = [await connected(port) for _ in range(3)]
        assert await answered(idle)
        assert await answered(begun)
        begun[1].write(HEAD[:10])
        server = port._runner.server
        assert server is not None
        await until(
            lambda: any(each._head_timer for each in server.connections), "a head has begun"
        )
        port.close_idle()
        assert await ended(idle) == b""
        assert await answered(begun, HEAD[10:])
        assert await answered(new)
        leaving = asyncio.create_task(port.connections.none_left(GUARD_S))
        begun[1].close()
        new[1].close()
        await asyncio.wait_for(leaving, GUARD_S)


@pytest.mark.parametrize("seed", range(3))
async def test_odd_heads_get_their_status_at_the_ports_of_metrics_and_probes(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    bounds, registry = HttpBounds(), CollectorRegistry()
    ports = [
        MetricsServer(registry, "127.0.0.1:0", bounds),
        ProbeServer("127.0.0.1:0", lambda: True, bounds),
    ]
    for port in ports:
        await port.start()
    expected = (b"\xff", b"100-continue", b"x", b"\xc3\xa9", b"a" * 4000, b", ,")
    try:
        for _ in range(60):
            path = rng.choice(
                (b"/metrics", b"/readyz", b"/" * 7000, b"/a" * 3500, b"/%ff", b'/?"', b"*")
            )
            expect = rng.choice(expected)
            odd = bytes(rng.randrange(0x80, 0x100) for _ in range(20))
            lines = (
                b"%s %s HTTP/1.1" % (rng.choice((b"GET", b"POST", b"OPTIONS")), path),
                b"Host: a", b"Connection: close", b"Expect: " + expect, b"Accept: " + odd,
            )  # fmt: skip
            peer = await asyncio.open_connection("127.0.0.1", rng.choice(ports).port)
            _opened.append(peer[1])
            peer[1].write(b"\r\n".join(lines) + b"\r\n\r\n")
            answer = (await ended(peer)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            status = int(answer.split()[1])
            if expect != b"100-continue":
                assert status in (417, 400), lines
            assert status < 500, lines
        assert not caplog.records
    finally:
        for port in ports:
            await port.stop()


def test_bounds_without_a_configuration_are_those_of_its_defaults() -> None:
    assert HttpBounds.of(HttpSettings()) == HttpBounds()
