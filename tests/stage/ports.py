"""Every kind of port that a router's process listens on, by itself, and what comes to one."""

import asyncio
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from events.plane.clock import unix_now
from router.api.service.server import http2_server
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.config.settings.serving_settings import GrpcSettings
from router.gateway.picker.server import PickerServer
from router.gateway.server.gateway import Gateway
from router.net.http2.frames import ACK, PING, PREFACE, SETTINGS, frame
from router.net.keys.certificates import Certificates
from router.net.keys.exposure import split_address
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.ports import MetricsServer, ProbeServer
from tests.stage.served import served

HTTP_PATHS = {"gateway": b"/health", "metrics": b"/metrics", "probes": b"/livez"}
KINDS = ("grpc", "picker", *HTTP_PATHS)
TLS_KINDS = ("grpc", "picker", "gateway", "metrics")
GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""
_PONG = frame(PING, ACK, 0, bytes(8))


@dataclass
class Port:
    """One that listens."""

    kind: str
    number: int
    connections: Connections

    @property
    def protocols(self) -> list[str]:
        """Of ALPN."""
        return [] if self.kind in HTTP_PATHS else ["h2"]

    @property
    def request(self) -> bytes:
        """A whole first request."""
        if self.kind in HTTP_PATHS:
            return b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % HTTP_PATHS[self.kind]
        return PREFACE + frame(SETTINGS, 0, 0) + frame(PING, 0, 0, bytes(8))

    async def serves(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> bool:
        """Whether a good client is served."""
        wanted = b"HTTP/1.1 200" if self.kind in HTTP_PATHS else _PONG
        try:
            reader, writer = await asyncio.open_connection(host, self.number, ssl=tls)
        except OSError:
            return False
        writer.write(self.request)
        read = b""
        async with asyncio.timeout(GUARD_S):
            while wanted not in read:
                more = await reader.read(1 << 16)
                if not more:
                    break
                read += more
        writer.transport.abort()
        return wanted in read


@asynccontextmanager
async def a_port(
    kind: str,
    *,
    listen: str = "127.0.0.1:0",
    certificates: Certificates | None = None,
    connections_max: int = 64,
    begin_s: float = GUARD_S,
) -> AsyncIterator[Port]:
    """begin_s: of each connection, until its first head is whole."""
    http = HttpBounds(connections_max=connections_max, head_timeout_s=begin_s)
    async with AsyncExitStack() as stack:
        if kind == "grpc":
            grpc = http2_server(GrpcSettings(), 1 << 20, certificates, http=http)
            stack.push_async_callback(grpc.stop, 0)
            await grpc.start(*split_address(listen))
            yield Port(kind, grpc.port, grpc.connections)
            return
        if kind == "probes":
            probes = ProbeServer(listen, lambda: True, http)
            stack.push_async_callback(probes.stop)
            await probes.start()
            yield Port(kind, probes.port, probes.connections)
            return
        if kind == "metrics":
            tls = None if certificates is None else certificates.contexts()
            metrics = MetricsServer(CollectorRegistry(), listen, http, tls)
            stack.push_async_callback(metrics.stop)
            await metrics.start()
            yield Port(kind, metrics.port, metrics.connections)
            return
        router = await stack.enter_async_context(served())
        broken: list[BaseException] = []
        if kind == "picker":
            picker = PickerServer(
                PickerSettings(listen=listen, tls="server" if certificates else "optional"),
                router.local(),
                CollectorRegistry(),
                clock=unix_now,
                broke=broken.append,
                bounds=http,
                certificates=certificates,
                requests=RequestSettings(accept_after_stop_s=0.001),
            )
            stack.push_async_callback(picker.stop)
            await picker.start()
            yield Port(kind, picker.port, picker.connections)
        else:
            gateway = Gateway(
                GatewaySettings(listen=listen, any_address=True),
                router.local(),
                CollectorRegistry(),
                clock=unix_now,
                broke=broken.append,
                bounds=http,
                certificates=certificates,
            )
            stack.push_async_callback(gateway.stop)
            await gateway.start()
            yield Port(kind, gateway.port, gateway.server.connections)
        assert not broken


def client_context(ca: bytes, *protocols: str) -> ssl.SSLContext:
    """Of a client that trusts a CA. protocols: of ALPN."""
    context = ssl.create_default_context(cadata=ca.decode())
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


def hello(*protocols: str) -> bytes:
    """A client's first bytes of TLS."""
    context = client_context_of_nobody()
    if protocols:
        context.set_alpn_protocols(protocols)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    made = context.wrap_bio(incoming, outgoing)
    with suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return outgoing.read()


def client_context_of_nobody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def break_a_handshake(port: Port, rng: random.Random) -> None:
    """Connects, sends something that is no whole handshake, and leaves in one of several ways."""
    whole = hello(*port.protocols)
    alert = b"\x15\x03\x01\x00\x02\x02" + bytes((rng.randrange(256),))
    sent = rng.choice(
        (
            b"",
            whole[: rng.randrange(1, len(whole))],
            whole,
            whole + alert,
            b"\x16" + rng.randbytes(rng.randrange(300)),
            b"\x16\x03\x01" + struct.pack(">H", rng.randrange(1 << 14)) + rng.randbytes(200),
            alert,
            port.request,
            port.request[: rng.randrange(1, len(port.request))],
            PREFACE,
            rng.randbytes(rng.randrange(1, 3000)),
        )
    )
    leaves = rng.choice(("close", "reset", "half-close", "alert"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    try:
        writer.write(sent)
        if leaves == "half-close":
            writer.write_eof()
            async with asyncio.timeout(GUARD_S):
                await reader.read()
        if leaves == "alert" and sent is whole:
            await reader.read(1)
            writer.write(alert)
        if leaves == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort() if leaves == "reset" else writer.close()
