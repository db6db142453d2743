"""Messages between a router and the child process that runs its relays: a size, then MessagePack.

    router ── Opening, then Start, Stop, LookAtModels ──> child
    router <── Status once a second, Ended ────────────── child

Both ends are of the same release, so the form has no version. A relay is named by the number of its
start, since a worker's next relay may be started while the one before is on its way out.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self, TypeVar

import msgspec

from events.plane.facts import Epoch
from events.plane.settings import DynamoSettings, EngineSettings, NatsSettings
from events.relay.rank_stream import RankStream
from indexer.identity import WorkerKey
from router.config.settings.keys_settings import ReadEnginesSettings
from router.config.settings.serving_settings import LogSettings

_SIZE = struct.Struct("<I")


class Opening(msgspec.Struct, frozen=True, tag=True):
    """The first message: settings that all relays of the child share."""

    name: str
    """Name of the child's connection to NATS."""
    nats: NatsSettings
    url: str
    fleet: str
    engines: ReadEnginesSettings
    log: LogSettings


class Start(msgspec.Struct, frozen=True, tag=True):
    """Command: run a relay."""

    number: int
    settings: EngineSettings


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Command: end a relay; the child reports that with an Ended."""

    number: int


class LookAtModels(msgspec.Struct, frozen=True, tag=True):
    """Command: read an engine's list of models soon."""

    number: int


Command = Opening | Start | Stop | LookAtModels


class RankStatus(msgspec.Struct, frozen=True):
    """Counts of one rank since its relay's start."""

    key: WorkerKey
    counts: dict[str, int]
    engine_gaps: int
    engine_restarts: int
    ledger_entries: int


class RelayStatus(msgspec.Struct, frozen=True):
    """Counts of one relay since its start."""

    worker_id: str
    counts: dict[str, int]
    ranks: list[RankStatus]


class CountedRelay(Protocol):
    """Interface of a relay, of an engine or of Dynamo, with the counts that metrics export."""

    counts: Counter[str]

    @property
    def settings(self) -> EngineSettings | DynamoSettings: ...

    @property
    def ranks(self) -> Sequence[tuple[WorkerKey, RankStream[Any]]]: ...


def relay_status(relay: CountedRelay) -> RelayStatus:
    """The counts of a relay in this process."""
    ranks = [
        RankStatus(
            key,
            dict(rank.counts),
            rank.engine_gaps,
            rank.engine_restarts,
            len(rank.ledger),
        )
        for key, rank in relay.ranks
    ]
    return RelayStatus(relay.settings.id, dict(relay.counts), ranks)


class RelayState(msgspec.Struct, frozen=True):
    """State of one relay of the child that the router acts on: whether its engine is there, and its
    epoch, which says whether it or another relay of the worker is newer."""

    number: int
    answered: bool
    """Whether its engine has ever answered."""
    epoch: Epoch
    """The highest epoch of its ranks."""


class BrokerStatus(msgspec.Struct, frozen=True):
    """State of the child's connection to NATS."""

    connected: bool
    counts: dict[str, int]
    unreadable: int

    def added_to(self, before: Self) -> Self:
        """This connection's counts, added to those of earlier connections."""
        counts = Counter(before.counts) + Counter(self.counts)
        return type(self)(self.connected, dict(counts), before.unreadable + self.unreadable)


class Status(msgspec.Struct, frozen=True, tag=True):
    """Message: the state of all relays that run in the child."""

    relays: list[RelayState]
    broker: BrokerStatus
    counts: msgspec.Raw
    """list[RelayStatus], which only a scrape of the metrics decodes."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Message: a relay has ended, by a Stop or by an error."""

    number: int
    error: str
    """Empty: it ended without one."""


Report = Status | Ended

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
COUNTS = msgspec.msgpack.Decoder(list[RelayStatus])
NO_COUNTS = _ENCODER.encode([])


def encoded_counts(relays: Iterable[CountedRelay]) -> msgspec.Raw:
    """Counts of some relays, encoded for a Status."""
    return msgspec.Raw(_ENCODER.encode([relay_status(relay) for relay in relays]))


def framed(message: Command | Report) -> bytes:
    """Bytes of a message, after its size."""
    encoded = _ENCODER.encode(message)
    return _SIZE.pack(len(encoded)) + encoded


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """Reads the next message; raises IncompleteReadError or ConnectionError when the other process
    ends.
    """
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return decoder.decode(await reader.readexactly(size))
