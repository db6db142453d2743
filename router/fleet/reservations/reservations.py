"""Open reservations, and the memory of ended ones that makes requests idempotent.

Laws:
- a reservation is open from its pick until a Report, its lease or its worker ends it: exactly once;
- the sum over open reservations is what WorkerLoad counts as ours; the prefill half of a pair
  counts until its prompt is computed, and no longer than the decode half;
- open and remembered reservations together never exceed the bounds in number and, but for the last
  one, in bytes of hashes: the oldest remembered are forgotten first;
- a request id finds its reservation while that is open, and for a while after it finished, but not
  if it ended otherwise: a caller that sends such a request again wants it served.
"""

from collections import OrderedDict
from collections.abc import Collection, Generator
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

import msgspec
import numpy as np
from typing_extensions import override

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.fleet.reservations.steps import add_reservation
from router.request.request import CLIENT_ID_END, Fingerprint, Objective


class Ending(StrEnum):
    """How a reservation ended; its values are values of a metric's label."""

    FINISHED = "finished"
    FAILED_WORKER = "failed_worker"
    FAILED_REFUSED = "failed_refused"
    """Refused by the worker, which takes no connections."""
    FAILED_TIMEOUT = "failed_timeout"
    FAILED_CLIENT = "failed_client"
    FAILED_CANCELLED = "failed_cancelled"
    FAILED_UNKNOWN = "failed_unknown"
    EXPIRED = "expired"
    WORKER_LOST = "worker_lost"


FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort", "other")
"""Why engines end answers, in OpenAI's words and vLLM's `abort`; values of a metric's label."""

HASH_BYTES_MAX = 1 << 30
"""Bytes of all prompts' hashes: 134 million blocks, or twenty thousand requests of 100,000 tokens
in blocks of 16."""

SLICE_UNITS = 1 << 14
"""Work of one slice of expired reservations, which are ended before other calls have a turn, in
units of about 20 ns: each counts one for each block of its prompt, and RESERVATION_UNITS. The last
reservation of a slice may go beyond it."""
RESERVATION_UNITS = 512
FIND_SLICE = 4096
"""Reservations that a search looks at without a turn for other calls: about 1 ms."""
FIND_MAX = 16
FORGOTTEN_SLICE = 256
"""Ended reservations that are forgotten before other calls have a turn."""


@dataclass(slots=True)
class PrefillHold:
    """The part of a pair's reservation that is on the prefill worker."""

    worker: WorkerKey
    predicted_tokens: int
    """Usable overlap there at the pick, by the worker's events."""
    new_tokens: int
    room: int
    """Number by which the pair's two engines know their request; no other one in flight has it."""
    open: bool = True
    """True until the prompt is computed, or the reservation ends."""


class Reservation(msgspec.Struct, eq=False, gc=False):
    """A request's reserved load on a worker, or on a pair of workers. It has no references that
    could form a cycle, so that the garbage collector need not track it.
    """

    id: str
    request_id: str
    worker: WorkerKey
    fingerprint: Fingerprint
    prefixes: HashArray
    own_blocks: int
    """Blocks of the prompt that no other request can share (Prompt.own_blocks)."""
    prompt_tokens: int
    predicted_tokens: int
    """Usable overlap at the pick, by the worker's events."""
    new_tokens: int
    """Prompt tokens that the worker computes; 0 when another worker does."""
    opened_at_s: float
    lease_ends_s: float
    answer: bytes
    """The encoded answer to the request, given again for a repeated request id; not read here."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    prefill_done: bool = False
    running: bool = False
    ended: Ending | None = None
    prefill: PrefillHold | None = None
    """The prefill worker's half of a pair; None: no pair."""
    shared: bool = False
    """Whether several callers have this answer: a caller that leaves does not end it."""
    tenant: str = ""
    """Empty: its request named none."""
    owner: str = ""
    """Name of the identity whose request it is; empty: its caller needed no key."""
    objective: Objective | None = None
    waited_s: float = 0.0
    """Seconds in the queue, before the pick."""

    def holds(self, workers: Collection[WorkerKey]) -> bool:
        """Whether the reservation is open on any of some workers."""
        prefill = self.prefill
        return self.worker in workers or (
            prefill is not None and prefill.open and prefill.worker in workers
        )

    def where_computed(self) -> "Reservation":
        """The reservation as it concerns the worker that computes the prompt: for a pair, a copy
        with the numbers of its prefill worker."""
        if self.prefill is None:
            return self
        return msgspec.structs.replace(
            self,
            worker=self.prefill.worker,
            predicted_tokens=self.prefill.predicted_tokens,
            new_tokens=self.prefill.new_tokens,
        )


class Reservations:
    """All reservations of this replica."""

    def __init__(
        self, memory_window_s: float, entries_max: int, hash_bytes_max: int = HASH_BYTES_MAX
    ) -> None:
        self.memory_window_s = memory_window_s
        """Seconds for which a reservation is remembered after its end."""
        self._entries_max = entries_max
        self._hash_bytes_max = hash_bytes_max
        self._hash_bytes = 0
        """Bytes of all prefixes, open and remembered."""
        self._open_hash_bytes = 0
        self._open: OrderedDict[str, Reservation] = OrderedDict()
        """Open reservations by id, the lease that ends first in front."""
        self._ended: OrderedDict[str, tuple[float, Reservation]] = OrderedDict()
        """Ended reservations by id, with when each ended."""
        self._by_request: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    @override
    def __repr__(self) -> str:
        return f"<Reservations {len(self._open)} open, {len(self._ended)} remembered>"

    def full(self) -> bool:
        """Whether the open reservations have reached their bound, in number or bytes of hashes."""
        many = len(self._open) >= self._entries_max
        return many or self._open_hash_bytes >= self._hash_bytes_max

    def add(self, reservation: Reservation) -> None:
        """Adds an open reservation; its request id must be free, and `full` false."""
        add_reservation(self, reservation)

    def _make_room(self) -> None:
        """Forgets the oldest ended reservations, until the bounds leave room for one more."""
        while self._ended and (
            len(self._open) + len(self._ended) >= self._entries_max
            or self._hash_bytes >= self._hash_bytes_max
        ):
            self._forget_oldest()

    def of_request(self, request_id: str) -> Reservation | None:
        """The open or remembered reservation of a request id; None: there is none."""
        return self._by_request.get(request_id)

    def get(self, reservation_id: str) -> Reservation | None:
        """The open or remembered reservation with an id; None: there is none."""
        reservation = self._open.get(reservation_id)
        if reservation is None and reservation_id in self._ended:
            reservation = self._ended[reservation_id][1]
        return reservation

    def find(self, wanted: str) -> Generator[None, None, list[Reservation]]:
        """Finds open and remembered reservations by an id, the newest first, FIND_MAX at most: the
        id of a reservation, of a request, or of a client whose request ids begin with it
        (CLIENT_ID_END). A generator, whose result is the list; it yields between slices.
        """
        fitting = []
        known = [*self._open.values(), *(ended for _, ended in self._ended.values())]
        for first in range(0, len(known), FIND_SLICE):
            yield
            fitting += [
                reservation
                for reservation in known[first : first + FIND_SLICE]
                if wanted in (reservation.id, reservation.request_id)
                or reservation.request_id.rpartition(CLIENT_ID_END)[0] == wanted
            ]
        fitting.sort(key=attrgetter("opened_at_s"), reverse=True)
        return fitting[:FIND_MAX]

    def renew(self, reservation: Reservation, lease_ends_s: float) -> None:
        """Moves the end of a reservation's lease; all leases are equally long, so the last renewed
        ends last.
        """
        reservation.lease_ends_s = lease_ends_s
        self._open.move_to_end(reservation.id)

    def end(self, reservation: Reservation, ending: Ending, now_s: float) -> None:
        """Ends a reservation, and remembers it for a while; its request id only if the request
        finished.
        """
        del self._open[reservation.id]
        self._open_hash_bytes -= reservation.prefixes.nbytes
        reservation.ended = ending
        if ending is not Ending.FINISHED:
            self._forget_request(reservation)
        self._ended[reservation.id] = (now_s, reservation)
        if reservation.cached_tokens is not None:  # so no report will be checked against them
            self._drop_hashes(reservation)

    def expired(self, now_s: float) -> list[Reservation]:
        """Open reservations whose lease has ended, oldest first: a slice of them (SLICE_UNITS)."""
        expired = []
        units = 0
        for reservation in self._open.values():
            if reservation.lease_ends_s > now_s or units >= SLICE_UNITS:
                break
            expired.append(reservation)
            units += RESERVATION_UNITS + len(reservation.prefixes)
        return expired

    def due(self, now_s: float) -> bool:
        """Whether a lease is over, or a reservation ended memory_window_s ago or before."""
        oldest = next(iter(self._open.values()), None)
        if oldest is not None and oldest.lease_ends_s <= now_s:
            return True
        ended_at_s, _ = next(iter(self._ended.values()), (now_s, None))
        return now_s - ended_at_s >= self.memory_window_s

    def on_workers(self, workers: Collection[WorkerKey]) -> list[Reservation]:
        """The open reservations of some workers."""
        wanted = frozenset(workers)
        return [reservation for reservation in self._open.values() if reservation.holds(wanted)]

    def forget_old(self, now_s: float) -> None:
        """Forgets reservations that ended memory_window_s ago or before: FORGOTTEN_SLICE a call."""
        for _ in range(min(FORGOTTEN_SLICE, len(self._ended))):
            ended_at_s, _ = next(iter(self._ended.values()))
            if now_s - ended_at_s < self.memory_window_s:
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (_, reservation) = self._ended.popitem(last=False)
        self._drop_hashes(reservation)
        self._forget_request(reservation)

    def _drop_hashes(self, reservation: Reservation) -> None:
        self._hash_bytes -= reservation.prefixes.nbytes
        reservation.prefixes = np.empty(0, np.uint64)

    def _forget_request(self, reservation: Reservation) -> None:
        if self._by_request.get(reservation.request_id) is reservation:
            del self._by_request[reservation.request_id]
