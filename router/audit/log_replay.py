"""What another policy says of logged decisions: agreement, and predicted differences. Pure.

Each decision is judged in the fleet as it was then, which the policy that decided had filled. Of
refusals it can say little: who is full, drained or of another role is so for every policy. It would
have taken one whose workers were left out for costs that were no numbers.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from router.audit.logged_decision import LoggedDecision, candidates, reasons
from router.audit.logged_refusal import LoggedRefusal
from router.audit.shadow_policy import Agreement, difference, would_pick
from router.config.settings import GuardSettings
from router.fleet.eligibility import NOT_A_NUMBER
from router.policies.first_token import first_token
from router.policies.own import PolicyFailed
from router.policies.policy import Policy


@dataclass(slots=True)
class SecondOpinion:
    """One policy's, in sums over the decisions that it could score."""

    policy: Policy
    decided_by: Counter[str] = field(default_factory=Counter)
    """Decisions, by the policy that made them."""
    agreements: Counter[Agreement] = field(default_factory=Counter)
    prompt_tokens: int = 0
    overlap_tokens: float = 0.0
    """Usable, of the picks."""
    more_overlap_tokens: float = 0.0
    """That its own choices would have had."""
    ttft_s: float = 0.0
    """To the first token, as predicted of the picks."""
    sooner_s: float = 0.0
    """That its own choices would have been."""
    active_slots: float = 0.0
    """Requests on the workers that were picked."""
    more_active_slots: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests that got no worker, by reason."""
    taken: int = 0
    """Of these: those that it would have taken."""

    @property
    def decisions(self) -> int:
        """Those that it could score."""
        return self.agreements.total() - self.agreements[Agreement.FAILED]

    def add(self, line: LoggedDecision) -> None:
        """One decision. Raises NoHashes for a policy that asks for what the line doesn't have."""
        rows, taken = candidates(line), line.picked
        assert taken is not None, "a decision as it is read has a pick"
        self.decided_by[line.policy] += 1
        try:
            told = difference(
                rows, reasons(line), taken, self.policy.score(rows), self._guard(line)
            )
        except PolicyFailed:
            self.agreements[Agreement.FAILED] += 1
            return
        self.agreements[told.agreement] += 1
        if told.agreement is Agreement.FAILED:
            return
        self.prompt_tokens += line.prompt_tokens
        self.overlap_tokens += rows.overlap_tokens.item(taken)
        self.more_overlap_tokens += told.overlap_tokens
        self.ttft_s += first_token(rows).total_s.item(taken)
        self.sooner_s += told.ttft_s
        self.active_slots += rows.active_slots.item(taken)
        self.more_active_slots += told.active_slots

    def add_refusal(self, line: LoggedRefusal) -> None:
        """One refusal. Raises NoHashes as `add` does."""
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
        """What looked at the picks of this policy when the line was written."""
        return line.guard if line.guard and line.guard.looks_at(self.policy.name) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: shares, and means over decisions."""
        count, tokens = max(1, self.decisions), max(1, self.prompt_tokens)
        return {
            "policy": self.policy.name,
            "decided_by": dict(self.decided_by),
            "decisions": self.decisions,
            "agreement": {one.value: self.agreements[one] for one in Agreement},
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
