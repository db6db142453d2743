"""Room for open requests and for the bytes of their bodies: in all, and of one client. Pure.

Laws:
- a byte takes room from when it comes until its request ends; an announced byte takes none;
- a client, known by its key or else by its address, holds at most its share of both, so that
  another client finds room;
- a refusal says whose room is full.
"""

import asyncio
from types import TracebackType
from typing import NamedTuple, Self

from router.gateway.refusals import FrontRefusal
from router.net.listener.addresses import client_of as address_client

_MIB = 1 << 20


class Client(NamedTuple):
    """A client, by which room is shared out."""

    kind: str
    """`key` or `address`."""
    name: str


class _Holding:
    """What the open requests of one client hold."""

    __slots__ = ("bytes", "open", "turn")

    def __init__(self) -> None:
        self.open = 0
        self.bytes = 0
        self.turn = asyncio.Lock()
        """Lock of unpacking: one large body of a client at a time."""


class Room:
    """The room of one gateway."""

    def __init__(
        self, *, open_max: int, bodies_mib_max: int, body_mib_max: int, share: float
    ) -> None:
        """share: of open_max and bodies_mib_max that one client may hold."""
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
        """The place of a request; raises FrontRefusal."""
        holding = self._holdings.get(client)
        if holding is not None and holding.open >= self._client_open_max:
            most = self._client_open_max
            raise FrontRefusal("TOO_MANY_REQUESTS", f"this {client.kind} has {most} open requests")
        if self.open >= self._open_max:
            message = f"all clients together have {self._open_max} open requests"
            raise FrontRefusal("TOO_MANY_REQUESTS", message)
        if holding is None:
            holding = self._holdings[client] = _Holding()
        return Place(self, client, holding)

    def check_size(self, size: int) -> None:
        """Raises FrontRefusal for a body over the bound of one."""
        if size > (most := self.body_max):
            raise FrontRefusal("BODY_TOO_LARGE", f"the body is over {most // _MIB} MiB")

    def _check(self, client: Client, holding: _Holding, size: int) -> None:
        """Whether so many bytes more find room; raises FrontRefusal."""
        if holding.bytes + size > (most := self._client_bytes_max):
            message = f"bodies of open requests of this {client.kind} hold {most // _MIB} MiB"
            raise FrontRefusal("TOO_MANY_BYTES", message)
        if self.bytes + size > (most := self._bytes_max):
            message = f"bodies of open requests of all clients hold {most // _MIB} MiB"
            raise FrontRefusal("TOO_MANY_BYTES", message)


class Place:
    """The room that one request holds until it is left."""

    __slots__ = ("_client", "_holding", "bytes", "room")

    def __init__(self, room: Room, client: Client, holding: _Holding) -> None:
        self.room = room
        self._client = client
        self._holding = holding
        self.bytes = 0
        room.open += 1
        holding.open += 1

    @property
    def turn(self) -> asyncio.Lock:
        """Held while a large body of this client is unpacked."""
        return self._holding.turn

    def announced(self, size: int) -> None:
        """Raises FrontRefusal for a body that finds no room now; takes none."""
        self.room._check(self._client, self._holding, size)

    def add(self, size: int) -> None:
        """Bytes came; raises FrontRefusal, and takes no room, if there is none."""
        self.room.check_size(self.bytes + size)
        self.room._check(self._client, self._holding, size)
        self.bytes += size
        self._holding.bytes += size
        self.room.bytes += size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves: the request is over."""
        room, holding = self.room, self._holding
        room.open -= 1
        room.bytes -= self.bytes
        holding.open -= 1
        holding.bytes -= self.bytes
        self.bytes = 0
        if not holding.open:
            del room._holdings[self._client]


def client_of(identity: str | None, address: str | None) -> Client:
    """identity: the name of the client's key; None: clients need none. address: of its connection;
    None, as of a unix socket: all of these are one client."""
    if identity is not None:
        return Client("key", identity)
    return Client("address", address_client(address) if address else "")
