"""The core's answers to requests, and the steps of a request's life that callers report."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from events.feed.fleet_view import Pull
from router.decide.decision.decision import Decision, Overlap
from router.fleet.reservations.reservations import Ending, Reservation


@dataclass(slots=True)
class Pick:
    """A decision with a picked worker, and its reservation."""

    reservation: Reservation
    decision: Decision
    overlap: Overlap
    """Overlap of the worker that computes the prompt."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The answer to a request that came before: the reservation that it got then."""

    reservation: Reservation


class ProgressState(StrEnum):
    """A step that a caller reports of its request."""

    PREFILL_DONE = "prefill_done"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Progress(NamedTuple):
    """A step in a reservation's life."""

    reservation_id: str
    state: ProgressState
    output_tokens: int = 0
    cached_tokens: int | None = None
    failure: Ending = Ending.FAILED_UNKNOWN
    failed_worker_id: str = ""
    """Id of the worker of a pair that failed; empty, or another id: the prefill worker counts as
    failed until the prompt is computed, then the decode worker."""
    unobserved: bool = False
    """Whether a running request's caller sees nothing of the answer
    (router/decide/core/unobserved.py)."""
    finish_reason: str = ""
    """Why a finished answer ended: one of FINISH_REASONS; empty: not known."""


class WaitStep(NamedTuple):
    """A change that a caller reports for its request in the queue: another priority, or that it no
    longer waits. request_id: as in the caller's Route."""

    request_id: str
    priority: int | None
    """The new one; None: the wait ends."""


class ProgressResult(StrEnum):
    """The outcome of a reported step."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    UNKNOWN = "unknown"


class Effects(NamedTuple):
    """Effects of a tick, which a driver performs: the core itself does no I/O."""

    expired: int
    """Reservations whose lease ended."""
    resyncs: list[Pull]
    """Workers to ask for all blocks again: their engines reuse less than the index says."""
    news: list[str]
    """Lines for the operator: workers ejected, and taken back."""
