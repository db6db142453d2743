"""What an attack is aimed at, and how it opens connections there."""

import asyncio
import os
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property
from typing import TypeAlias

import msgspec

Peer: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

ADDRESS = "127.0.0.66"
"""Of the attacker: another client address than the good client's."""
TURN_S = 0.005
"""Between two bursts: the machine's cores are the server's, too."""
AGAIN_S = 0.05
"""Before a connection is opened again."""

opened: Counter[str] = Counter()
"""Connections by port."""


class Target(msgspec.Struct, dict=True):
    """A server's ports on loopback by name: `grpc`, `gateway`, `picker` (Envoy's endpoint
    picker), `metrics` and `probes`."""

    ports: dict[str, int]
    ca_file: str | None = None
    """None: the server has neither TLS nor keys. The port of the probes never has TLS."""
    token: str | None = None
    """Of the attacker: a key with rights, and with limits."""

    @cached_property
    def _http1(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)

    @cached_property
    def _http2(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        context.set_alpn_protocols(["h2"])
        return context

    async def connect(self, name: str, *, plain: bool = False) -> Peer:
        """A connection to a port, with TLS where the server has it, unless `plain`."""
        tls = None
        if self.ca_file is not None and name != "probes" and not plain:
            tls = self._http2 if name in ("grpc", "picker") else self._http1
        peer = await asyncio.open_connection(
            "127.0.0.1", self.ports[name], local_addr=(ADDRESS, 0), ssl=tls
        )
        opened[name] += 1
        return peer


async def again_and_again(
    target: Target,
    name: str,
    play: Callable[[Peer], Awaitable[None]],
    *,
    reads: bool = True,
    plain: bool = False,
) -> None:
    """Plays on one connection after the other."""
    while True:
        with suppress(OSError, EOFError):
            peer = await target.connect(name, plain=plain)
            reading = asyncio.create_task(_read(peer[0])) if reads else None
            try:
                await play(peer)
            finally:
                peer[1].transport.abort()
                if reading is not None:
                    reading.cancel()
        await asyncio.sleep(AGAIN_S)


async def _read(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def send(peer: Peer, *parts: bytes) -> None:
    """Sends parts with a pause after each; raises ConnectionResetError once the peer has left."""
    for part in parts:
        if peer[1].is_closing() or peer[0].at_eof():
            raise ConnectionResetError
        peer[1].write(part)
        await peer[1].drain()
        await asyncio.sleep(TURN_S)


async def until_left(peer: Peer) -> None:
    """Says nothing until the server closes the connection."""
    while not peer[0].at_eof():  # noqa: ASYNC110  # another task reads, and sees its end
        await asyncio.sleep(1.0)


def pin(*, attacker: bool) -> None:
    """Keeps this process on one core: the attacker's is another than the server's and the good
    client's, if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1] if attacker else cores[0]})
