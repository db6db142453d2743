"""What served a connection is freed when the connection ends, without a search for cycles.

Python looks through all objects once in 100 million new ones (router/app/cli/run.py): what waits
for that is resident as long as the process runs, and a connection with TLS has 256 KiB of uvloop's.
"""

import asyncio
import gc
import logging
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from router.gateway.picker.calls import PROCESS
from router.net.http.bounded import BoundedHandler
from router.net.http2.calls import Call, Calls
from router.net.http2.machine import Connection
from router.net.http2.sending import Stream
from router.net.http2.sockets import Http2Protocol
from router.net.keys.certificates import Certificates
from router.net.listener.connections import Place
from tests.stage.certificates import Authority, written
from tests.stage.http2_frames import DATA, END_HEADERS, HEADERS, call_head, frame
from tests.stage.ports import GUARD_S, KINDS, TLS_KINDS, Port, a_port, client_context, hello
from tests.stage.waiting import until

SERVED_BY = (Place, BoundedHandler, Http2Protocol, Connection, Stream, Calls, Call)
CONNECTIONS = 60
AT_ONCE = 12
ENDS = ("close", "reset", "half-close")
LINGER = struct.pack("ii", 1, 0)


@pytest.fixture
def no_search() -> Iterator[None]:
    """What is garbage here is freed by its references, or not at all."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.collect()


def kept() -> Counter[str]:
    """What there is of connections, and of their TLS on the server's side."""
    return Counter(
        type(one).__name__
        for one in gc.get_objects()
        if isinstance(one, SERVED_BY) or (isinstance(one, ssl.SSLObject) and one.server_side)
    )


def some_bytes(port: Port, rng: random.Random) -> bytes:
    """A request, or a part of one, or several, or nothing."""
    whole = port.request
    if port.protocols:
        path = PROCESS.encode() if port.kind == "picker" else b"/kvroute.v1.Router/Route"
        for stream in range(1, 2 * rng.randrange(1, 20), 2):
            message = struct.pack(">BI", 0, 4) + bytes(rng.randrange(5))
            whole += frame(HEADERS, END_HEADERS, stream, call_head(path))
            whole += frame(DATA, rng.randrange(2), stream, message)
    else:
        whole *= rng.randrange(1, 4)
    return rng.choice((b"", whole, whole, whole[: rng.randrange(1, len(whole))], b"no request" * 9))


async def play(port: Port, context: ssl.SSLContext | None, rng: random.Random) -> None:
    """One connection, which ends somewhere: before its handshake, within, or after it."""
    plain = context is None or rng.random() < 0.3
    sent, ends = some_bytes(port, rng), rng.choice(ENDS)
    if plain and context is not None:
        whole = hello(*port.protocols)
        sent = rng.choice((sent, whole, whole[: rng.randrange(1, len(whole))]))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port.number, ssl=None if plain else context
    )
    try:
        writer.write(sent)
        if rng.random() < 0.5 and sent:
            async with asyncio.timeout(rng.uniform(0.0, 0.1)):
                await reader.read(1 << 16)
        if ends == "half-close" and writer.can_write_eof():
            writer.write_eof()
            async with asyncio.timeout(GUARD_S):
                while await reader.read(1 << 16):
                    pass
        if ends == "reset":
            peer: socket.socket = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort() if ends == "reset" else writer.close()


@pytest.mark.parametrize(
    ("kind", "has_tls"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in TLS_KINDS]
)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.usefixtures("no_search")
def test_nothing_is_kept_of_connections_that_are_over(
    kind: str, has_tls: bool, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "kvroute")  # pytest keeps lines, and the errors in them
    authority = Authority()
    certificates = Certificates(written(tmp_path, authority.issue())) if has_tls else None

    async def scenario() -> None:
        rng = random.Random(seed)
        async with a_port(kind, certificates=certificates) as port:
            context = client_context(authority.pem, *port.protocols) if has_tls else None
            assert await port.serves(context)
            for _ in range(CONNECTIONS // AT_ONCE):
                await asyncio.gather(*(play(port, context, rng) for _ in range(AT_ONCE)))
            await until(lambda: not port.connections.open, f"all are over (seed {seed})")
            await until(lambda: not kept(), f"none is kept (seed {seed})")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
