"""A shadow policy: scores decisions that another policy makes, and never acts. Pure.

Gains and losses are differences of the router's predictions for both picks: tokens of usable
overlap, and seconds to the first token (router/decide/policies/first_token.py). How the fleet would
be if the shadow policy decided all along, only a simulation shows (`kvroute simulate`).

Law: picks do not depend on the shadow policy.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from router.config.settings.routing_settings import GuardSettings
from router.decide.decision.decision import Decision
from router.decide.decision.guard import Waits
from router.decide.policies.candidates import Candidates
from router.decide.policies.first_token import first_token
from router.decide.policies.own import PolicyFailed
from router.decide.policies.pair import DECODE_ROOM
from router.decide.policies.policy import Policy, Scores
from router.fleet.table import Column, Flags


class Agreement(StrEnum):
    """Whether a policy would have made another policy's pick; its values are values of a metric's
    label.
    """

    SAME = "same"
    """The same worker would have been picked."""
    TIED = "tied"
    """The pick would have been drawn among several workers, this one included."""
    OTHER = "other"
    """Another worker would have been picked."""
    FAILED = "failed"
    """The policy failed on this decision."""


class Difference(NamedTuple):
    """Gains of a policy's own choice over the pick; means over the choices where it is drawn."""

    agreement: Agreement
    overlap_tokens: float = 0.0
    """Usable overlap of the choice less that of the pick, tokens."""
    ttft_s: float = 0.0
    """Seconds by which the choice's first token is predicted to come sooner."""
    active_slots: float = 0.0
    """Requests on the choice's worker less those on the picked worker."""


def difference(
    rows: Candidates,
    excluded: Sequence[str],
    taken: int,
    scores: Scores,
    guard: GuardSettings | None = None,
    ttft_s: Column | None = None,
) -> Difference:
    """Compares a policy's scores with a pick.

    excluded: reason for each row why it could not be picked; empty where it could. taken: the
    picked row. guard: the guard of the policy's picks; None: it has none. ttft_s: predicted seconds
    to the first token of each row, if they were computed before.
    """
    chances = guarded_chances(rows, excluded, scores, guard)
    if chances is None:
        return Difference(Agreement.FAILED)
    taken_chance = float(chances[taken])
    agreement = Agreement.OTHER
    if taken_chance > 0:
        agreement = Agreement.TIED if taken_chance < 1 else Agreement.SAME

    def gain(column: Column) -> float:
        return float(chances @ column - column[taken])

    return Difference(
        agreement,
        overlap_tokens=gain(rows.overlap_tokens),
        ttft_s=-gain(first_token(rows).total_s if ttft_s is None else ttft_s),
        active_slots=gain(rows.active_slots),
    )


def guarded_chances(
    rows: Candidates,
    excluded: Sequence[str],
    scores: Scores,
    guard: GuardSettings | None = None,
) -> Column | None:
    """Chance of each row to be picked by a policy and its guard; None if no row could be picked.

    excluded, guard: see `difference`.
    """
    can = np.array([not reason for reason in excluded], np.bool_) & np.isfinite(scores.costs)
    chances = would_pick(scores, can)
    if chances is None or guard is None:
        return chances
    return _moved(chances, scores.costs, can, Waits.of(rows, can, guard).passed_over)


def would_pick(scores: Scores, can: Flags) -> Column | None:
    """Chance of each row to be picked, 1 in sum; None if no row could be picked.

    can: True for each row that may be picked; these have finite costs.
    """
    if not can.any():
        return None
    if scores.chances is not None:
        weights = np.where(can, scores.chances, 0.0)
    else:
        weights = np.where(can & (scores.costs == scores.costs[can].min()), 1.0, 0.0)
    total = float(weights.sum())
    return weights / total if total > 0 else None


def _moved(chances: Column, costs: Column, can: Flags, passed_over: Flags) -> Column:
    """Chances of rows to be picked under the guard: those of the rows that it passes over go to the
    cheapest of the other rows."""
    moved = float(chances[passed_over].sum())
    if not moved:
        return chances
    stays = can & ~passed_over
    cheapest = stays & (costs == costs[stays].min())
    after: Column = np.where(passed_over, 0.0, chances) + cheapest * (moved / cheapest.sum())
    return after


class Shadow:
    """A shadow policy, with its counts so far."""

    def __init__(self, policy: Policy, guard: GuardSettings) -> None:
        self.policy = policy
        self._guard = guard if guard.looks_at(policy.name) else None
        """The guard that the policy's own picks would have; None: no guard."""
        self.decisions: Counter[Agreement] = Counter()
        self.overlap_tokens = Balance()
        self.ttft_s = Balance()

    @property
    def settings(self) -> tuple[object, ...]:
        """The settings that the counts depend on: policy, parameters, affinity, guard."""
        policy = self.policy
        return policy.name, policy.settings, policy.affinity_bonus, self._guard

    def watch(self, decision: Decision) -> None:
        """Scores a sampled decision before its reservation, and counts how the pick compares."""
        if decision.policy.name == DECODE_ROOM.name:
            return  # made for room to decode in, about a prompt that may be computed elsewhere
        try:
            scores = self.policy.score(decision.rows)
        except PolicyFailed:
            self.decisions[Agreement.FAILED] += 1
            return
        gain = difference(decision.rows, decision.excluded, decision.order[0], scores, self._guard)
        self.decisions[gain.agreement] += 1
        self.overlap_tokens.add(gain.overlap_tokens)
        self.ttft_s.add(gain.ttft_s)


@dataclass
class Balance:
    """The sums of gains and of losses, two numbers that only rise."""

    gain: float = 0.0
    loss: float = 0.0

    def add(self, amount: float) -> None:
        if amount > 0:
            self.gain += amount
        else:
            self.loss -= amount
