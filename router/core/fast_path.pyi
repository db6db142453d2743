"""The native lane: plain requests picked, reserved and answered, bytes to bytes (fast_path.pyx)."""

import random
from collections.abc import Callable

from router.core.core import RouterCore
from router.core.progress import Pick
from router.core.tally import PickTally
from router.decision.decision import Decision
from router.reservations.reservations import Reservation

ITEMS_MAX: int
"""Items of a batch."""
LONG_BYTES: int
"""A request up to this size is read, hashed and picked for in one step."""

class Batch:
    """A RouteBatch, item by item: `next` goes on to one, and the attributes are of that one."""

    def __init__(self, content: bytes, items_max: int = ITEMS_MAX) -> None:
        """Raises ValueError for bytes that must be put in order first, TooMuch for more items."""

    def __len__(self) -> int:
        """Items that are left."""

    def next(self) -> bool:
        """Whether there is another one."""

    @property
    def index(self) -> int: ...
    @property
    def timeout_ms(self) -> int: ...
    @property
    def cancel(self) -> bool: ...
    @property
    def place(self) -> int:
        """Where the item is that the batch is at, for request_of."""

    def request_of(self, place: int) -> bytes:
        """The RouteRequest's bytes of the item at a place, wherever the batch is at.

        The caller chooses indexes, and may give the same to several items. Raises KeyError."""

    @property
    def request(self) -> bytes | None:
        """A RouteRequest's bytes; None for an item without."""

class Results:
    """A RouteResults message that grows."""

    def __len__(self) -> int: ...
    def add_answer(self, index: int, answer: bytes) -> None:
        """An item's RouteResponse."""

    def add_status(self, index: int, status: bytes) -> None:
        """An item's google.rpc.Status."""

    def take(self) -> bytes:
        """The message's bytes; the next one begins."""

class Lane:
    """The native lane of one RouterCore."""

    tally: PickTally
    """Counts the picks that are answered here."""
    traces: bool
    """Whether the general path has requests of sampled traces: it has the times of their stages."""

    def __init__(self, core: RouterCore, rng: random.Random) -> None:
        """core: with a NativeIndex. rng: the core's own."""

    def answer(
        self,
        request: bytes,
        now_s: float,
        is_behind: Callable[[str], bool] | None = None,
    ) -> Reservation | None:
        """A RouteRequest's reservation, with its answer; None: the general way must answer.

        is_behind: of a model's name, whether other requests wait for its workers, so that the
        general way must answer; None: no request waits."""

    def answers(
        self,
        batch: Batch,
        results: Results,
        waited_ms: int,
        now_s: float,
        reservations: dict[int, Reservation],
        places: list[tuple[Reservation, int]] | None,
        is_behind: Callable[[str], bool] | None = None,
    ) -> None:
        """Answers a batch's items from the next one on, until one isn't plain, or is longer than
        LONG_BYTES, or enough is done.

        waited_ms: how long they have waited; one that has waited too long stays, too.
        reservations: gets each item's, by index. places: gets each with the item's place, for
        Batch.request_of; None: nobody wants them.
        """

class AnswerWriter:
    """Writes answers to picks of one RouterCore, and the records of its decisions."""

    def __init__(self, core: RouterCore, prefill_worker: Callable[[Decision, int], bytes]) -> None:
        """prefill_worker: a PrefillWorker of the decision about it and its bootstrap room,
        written."""

    def answer(self, pick: Pick, priority: int, omit_receipt: bool) -> bytes:
        """A RouteResponse, to a pick that is not reserved yet: its receipts show workers as they
        were. priority: of the request, higher is sooner."""

    def receipt(self, decision: Decision) -> bytes:
        """The Receipt of a decision, with or without a pick."""

    def row(self, decision: Decision, row: int) -> bytes:
        """A CandidateRow."""
