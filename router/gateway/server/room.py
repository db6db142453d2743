"""Bounds on open requests and the bytes of their bodies, in all and of one client. Pure.

Laws:
- a byte takes room from when it comes until its request ends; an announced byte takes none;
- a client, known by its key or else by its address, holds at most its share of both, so that
  another client finds room;
- a refusal says whose room is full.
"""

import asyncio
from typing import NamedTuple, Self

from router.gateway.refusals import GatewayRefusal
from router.net.listener.addresses import client_of as address_client

_MIB = 1 << 20


class Client(NamedTuple):
    """A client, as the bounds count it."""

    kind: str
    """`key` or `address`."""
    name: str


class _Holding:
    """Numbers of one client's open requests and their bytes."""

    __slots__ = ("bytes", "open", "turn")

    def __init__(self) -> None:
        self.open = 0
        self.bytes = 0
        self.turn = asyncio.Lock()
        """Lock of unpacking: one large body of the client at a time."""


class Room:
    """Open requests and bytes of one gateway, with their bounds."""

    def __init__(
        self, *, open_max: int, bodies_mib_max: int, body_mib_max: int, share: float
    ) -> None:
        """share: share (0 to 1) of open_max and bodies_mib_max that one client may use."""
        self.open = 0
        self.bytes = 0
        self.body_max = body_mib_max * _MIB
        self._open_max = open_max
        self._bytes_max = max(bodies_mib_max * _MIB, self.body_max)
        self._client_open_max = max(1, int(open_max * share))
        self._client_bytes_max = max(int(self._bytes_max * share), self.body_max)
        self._holdings: dict[Client, _Holding] = {}
        """Holdings of clients with open requests."""

    def enter(self, client: Client) -> "Place":
        """A place for a request, which counts as open once it is entered (`with`); raises
        GatewayRefusal when a bound is reached."""
        holding = self._holdings.get(client)
        if holding is not None and holding.open >= self._client_open_max:
            most = self._client_open_max
            raise GatewayRefusal(
                "TOO_MANY_REQUESTS",
                f"this {client.kind} has {most} open requests, which is the limit",
            )
        if self.open >= self._open_max:
            message = f"all clients together have {self._open_max} open requests, the limit"
            raise GatewayRefusal("TOO_MANY_REQUESTS", message)
        return Place(self, client, holding or _Holding())

    def check_size(self, size: int) -> None:
        """Raises GatewayRefusal for a body larger than one may be."""
        if size > (most := self.body_max):
            raise GatewayRefusal("BODY_TOO_LARGE", f"the body is over {most // _MIB} MiB")

    def _check(self, client: Client, holding: _Holding, size: int) -> None:
        """Raises GatewayRefusal if `size` more bytes would exceed a bound."""
        if holding.bytes + size > (most := self._client_bytes_max):
            message = f"bodies of requests of this {client.kind} hold {most // _MIB} MiB, the limit"
            raise GatewayRefusal("TOO_MANY_BYTES", message)
        if self.bytes + size > (most := self._bytes_max):
            message = f"bodies of requests of all clients hold {most // _MIB} MiB, the limit"
            raise GatewayRefusal("TOO_MANY_BYTES", message)


class Place:
    """An open request in a Room, which counts with its body's bytes while it is entered (`with`).
    Between Room.enter and that nothing may wait."""

    __slots__ = ("_client", "_holding", "bytes", "room")

    def __init__(self, room: Room, client: Client, holding: _Holding) -> None:
        self.room = room
        self._client = client
        self._holding = holding
        self.bytes = 0

    @property
    def turn(self) -> asyncio.Lock:
        """Lock that is held while a large body of this client is unpacked."""
        return self._holding.turn

    def announced(self, size: int) -> None:
        """Raises GatewayRefusal for a body of `size` bytes that would exceed a bound now; counts
        nothing.
        """
        self.room._check(self._client, self._holding, size)

    def add(self, size: int) -> None:
        """Counts bytes of the body that came; raises GatewayRefusal, and counts nothing, beyond a
        bound.
        """
        self.room.check_size(self.bytes + size)
        self.room._check(self._client, self._holding, size)
        self.bytes += size
        self._holding.bytes += size
        self.room.bytes += size

    def __enter__(self) -> Self:
        self.room._holdings[self._client] = self._holding
        self.room.open += 1
        self._holding.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the request and its bytes out of the room: the request is over."""
        room, holding = self.room, self._holding
        room.open -= 1
        room.bytes -= self.bytes
        holding.open -= 1
        holding.bytes -= self.bytes
        self.bytes = 0
        if not holding.open:
            del room._holdings[self._client]


def client_of(identity: str | None, address: str | None) -> Client:
    """The client of a request. identity: the name of its key; None: clients need none. address: of
    its connection; None: a unix socket, all of which count as one client.
    """
    if identity is not None:
        return Client("key", identity)
    return Client("address", address_client(address) if address else "")
