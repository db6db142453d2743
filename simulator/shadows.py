"""Policies that watch: they score the requests that another one picks for, and never act. Pure.

Law: a run with shadows goes as it would without them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from router.decision import Decision, Request
from router.refusals import Refusal
from simulator.results import ShadowResult
from simulator.virtual_router import VirtualRouter


class Shadows:
    """What the policies would have done, in sums."""

    def __init__(self, policies: Sequence[str]) -> None:
        self._policies = policies
        self._decisions: Counter[str] = Counter()
        self._agreements: Counter[str] = Counter()
        self._tokens_more: Counter[str] = Counter()

    def decide(self, router: VirtualRouter, request: Request, now_s: float) -> list[Decision]:
        """Their decisions, to be told to `compare`; call before the one that counts is made."""
        state = router.rng.getstate()  # ties are broken at random, and theirs must not matter
        decisions = []
        for policy in self._policies:
            try:
                decisions.append(router.core.decide(replace(request, policy=policy), now_s))
            except Refusal:
                continue
        router.rng.setstate(state)
        return decisions

    def compare(self, decisions: Sequence[Decision], picked: Decision) -> None:
        """Holds what they decided against what was picked."""
        picked = picked.prefill or picked  # of a pair it is the prompt that policies differ about
        if not picked.order:
            return
        row = picked.order[0]
        overlap = picked.overlap(row)
        for decided in decisions:
            decision = decided.prefill or decided
            if not decision.order:
                continue
            name, best = decision.policy.name, decision.order[0]
            costs = decision.scores.costs
            self._decisions[name] += 1
            self._agreements[name] += bool(costs[row] <= costs[best])
            self._tokens_more[name] += decision.overlap(best).told - overlap.told

    def results(self) -> dict[str, ShadowResult]:
        """By policy."""
        return {
            name: ShadowResult(
                self._decisions[name], self._agreements[name], self._tokens_more[name]
            )
            for name in self._policies
        }
