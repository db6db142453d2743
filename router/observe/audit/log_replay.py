"""Scores logged decisions by another policy: its agreement, and predicted differences. Pure.

Each decision is scored with the fleet's state of that time, which the deciding policy had caused.
A policy can change few refusals: a full, drained or otherwise unfit worker is so for every policy.
Only a refusal for costs that were not numbers may be a pick by another policy.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from router.config.settings.routing_settings import GuardSettings
from router.decide.policies.first_token import first_token
from router.decide.policies.own import PolicyFailed
from router.decide.policies.policy import Policy
from router.fleet.eligibility import NOT_A_NUMBER
from router.observe.audit.logged_decision import LoggedDecision, candidates, reasons
from router.observe.audit.logged_refusal import LoggedRefusal
from router.observe.audit.shadow_policy import Agreement, difference, would_pick


@dataclass(slots=True)
class SecondOpinion:
    """Sums for one policy over the decisions that it could score."""

    policy: Policy
    decided_by: Counter[str] = field(default_factory=Counter)
    """Decisions, by the policy that made them."""
    agreements: Counter[Agreement] = field(default_factory=Counter)
    prompt_tokens: int = 0
    overlap_tokens: float = 0.0
    """Usable overlap of the picks."""
    more_overlap_tokens: float = 0.0
    """Usable overlap that the policy's own choices would have had more than the picks."""
    ttft_s: float = 0.0
    """Seconds to the first token, in sum, as predicted of the picks."""
    sooner_s: float = 0.0
    """Seconds to the first token that the policy's own choices would have saved."""
    active_slots: float = 0.0
    """Requests on the picked workers, summed over decisions."""
    more_active_slots: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests that got no worker, by reason."""
    taken: int = 0
    """Refused requests that the policy would have taken."""

    @property
    def decisions(self) -> int:
        """Decisions that the policy could score."""
        return self.agreements.total() - self.agreements[Agreement.FAILED]

    def add(self, line: LoggedDecision) -> None:
        """Adds a decision. Raises NoHashes for a policy that needs hashes the line lacks."""
        rows, taken = candidates(line), line.picked
        assert taken is not None, "a decision as it is read has a pick"
        self.decided_by[line.policy] += 1
        try:
            gain = difference(
                rows, reasons(line), taken, self.policy.score(rows), self._guard(line)
            )
        except PolicyFailed:
            self.agreements[Agreement.FAILED] += 1
            return
        self.agreements[gain.agreement] += 1
        if gain.agreement is Agreement.FAILED:
            return
        self.prompt_tokens += line.prompt_tokens
        self.overlap_tokens += rows.overlap_tokens.item(taken)
        self.more_overlap_tokens += gain.overlap_tokens
        self.ttft_s += first_token(rows).total_s.item(taken)
        self.sooner_s += gain.ttft_s
        self.active_slots += rows.active_slots.item(taken)
        self.more_active_slots += gain.active_slots

    def add_refusal(self, line: LoggedRefusal) -> None:
        """Adds a refusal. Raises NoHashes as `add` does."""
        self.refusals[line.reason] += 1
        if (decision := line.decision) is None:
            return
        can = np.array([why in ("", NOT_A_NUMBER) for why in reasons(decision)], np.bool_)
        try:
            scores = self.policy.score(candidates(decision))
        except PolicyFailed:
            return
        self.taken += would_pick(scores, can & np.isfinite(scores.costs)) is not None

    def _guard(self, line: LoggedDecision) -> GuardSettings | None:
        """The guard that this policy's picks had when the line was written; None: none."""
        return line.guard if line.guard and line.guard.looks_at(self.policy.name) else None

    def as_dict(self) -> dict[str, Any]:
        """Returns shares, and means over decisions, for JSON."""
        count, tokens = max(1, self.decisions), max(1, self.prompt_tokens)
        return {
            "policy": self.policy.name,
            "decided_by": dict(self.decided_by),
            "decisions": self.decisions,
            "agreement": {agreement.value: self.agreements[agreement] for agreement in Agreement},
            "hit_ratio": {
                "picked": self.overlap_tokens / tokens,
                "would_be": (self.overlap_tokens + self.more_overlap_tokens) / tokens,
            },
            "ttft_s": {
                "picked": self.ttft_s / count,
                "would_be": (self.ttft_s - self.sooner_s) / count,
            },
            "active_slots": {
                "picked": self.active_slots / count,
                "would_be": (self.active_slots + self.more_active_slots) / count,
            },
            "refusals": dict(self.refusals),
            "refusals_taken": self.taken,
        }
