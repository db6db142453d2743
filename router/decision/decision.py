"""Decisions: the pick of a request, and every number that it was made of. Pure data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events.feed.fleet_view import Source
from router.config.settings.routing_settings import GuardSettings
from router.decision.guard import Guarded
from router.fleet.table import most
from router.policies.candidates import Candidates
from router.policies.policy import Policy, Scores
from router.request.refusal import Refusal
from router.request.request import Request


class Prefill(StrEnum):
    """Where the prompt of a pair is computed; the metric label."""

    REMOTE = "remote"
    """By the prefill worker, which hands its KV cache over."""
    LOCAL = "local"
    """By the decode worker: hardly anything is new to it."""
    ABSENT = "absent"
    """By one worker alone, for want of another."""


class Overlap(NamedTuple):
    """How much of the prompt a worker holds, in tokens; the rows of a match last, in order."""

    raw: int
    usable: int
    device: int
    host: int
    disk: int
    predicted: int

    @property
    def by_events(self) -> int:
        """Usable, by the worker's events, without predictions."""
        return self.device + self.host + self.disk


@dataclass(slots=True)
class Decision:
    """All candidates with their scores, and the pick."""

    request: Request
    policy: Policy
    rows: Candidates
    """No rows when no worker of the pool is live."""
    sources: Sequence[Source]
    """A worker a row."""
    tokens: npt.NDArray[np.int32]
    """Shape (fields of Overlap, rows)."""
    scores: Scores
    excluded: Sequence[str]
    """Why a row can't be picked; empty when it can."""
    order: list[int]
    """The pick, and the rows next to it that could be picked, cheapest first."""
    tied: int
    """Rows that shared the lowest cost."""
    not_live: list[tuple[Source, str]]
    """Workers of the pool that made no row, and why."""
    decided_at_s: float
    prefill: "Decision | None" = None
    """Of a pair: the decision about the prefill worker; this object is about the decode worker."""
    how: "Prefill | None" = None
    """Of a pair: where the prompt is computed."""
    guard: GuardSettings | None = None
    """The guard of the pick; None: no guard."""
    guarded: Guarded | None = None
    """The row that the guard moved the pick from; None: the pick stayed."""
    last_resort: bool = False
    """Whether the candidates were those tried only where no answering worker may be picked."""
    strained: bool = False
    """Whether the candidates include workers over their learned capacity, since no other has
    room."""
    waited_s: float = 0.0
    """In the router's queue; set for watchers alone, by router/audit/sampling.py."""

    @property
    def computing(self) -> "Decision":
        """The decision about the worker that computes the prompt."""
        return self.prefill if self.prefill and self.how is Prefill.REMOTE else self

    def overlap(self, row: int) -> Overlap:
        return Overlap._make(self.tokens[:, row].tolist())

    def best_overlap_tokens(self) -> int:
        """The largest usable overlap of any worker."""
        return int(most(self.tokens[1]))

    def exclusions(self) -> Mapping[str, int]:
        """Reason -> workers."""
        if not self.not_live and not any(self.excluded):
            return {}
        reasons = Counter(reason for _, reason in self.not_live)
        reasons.update(filter(None, self.excluded))
        return reasons


@dataclass(eq=False)
class NobodyFits(Refusal):
    """A refusal of a request whose workers were weighed."""

    decision: Decision | None = None
    """The candidates; of a pair, the half for which no worker fits."""
