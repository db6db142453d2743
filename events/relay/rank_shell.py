"""One engine rank in its relay: its stream, its saved ledger, its load."""

import asyncio
from math import inf

from events.engines.events import LoadSample
from events.plane.supervisor import Supervisor
from events.relay.ledger_file import LedgerSaver
from events.relay.rank import Rank
from events.relay.stream_publisher import OutgoingStream
from events.relay.warmer import Warmer
from indexer.identity import WorkerKey


class RankShell(OutgoingStream[Rank]):
    """One rank: its stream, its sockets, its load."""

    def __init__(self, key: WorkerKey, rank: Rank, supervisor: Supervisor, number: int) -> None:
        """number: the engine's own number of the rank, as in its events, ports and metrics. The
        worker's key has the rank's place in this engine instead, by which requests name it."""
        super().__init__(key, rank, supervisor)
        self.number = number
        self.saver: LedgerSaver | None = None
        """Saves the rank's ledger; None: it is not saved."""
        self.warmer: Warmer | None = None
        """Computes prefixes for routers; None: not allowed."""
        self.load: LoadSample | None = None
        self.sampled_at_s: float | None = None
        self.own_numbers: dict[str, float] = {}
        """The operator's own numbers; apart from `load`, as a feed of loads has none."""
        self.own_numbers_at_s = -inf
        """When own_numbers were read, Unix time."""
        self.replaying: asyncio.Task[None] | None = None
        self.resumed = False
        """Whether a saved ledger has been read."""
        self.started = False
        """Whether a subscription to the engine's events has been up."""
