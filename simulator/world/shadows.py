"""Policies that watch: they score the requests that another one picks for, and never act. Pure.

Law: a run with shadows goes as it would without them.
"""

from collections.abc import Sequence

from router.audit.shadow_policy import Agreement, Shadow
from router.config.settings import RoutingSettings
from router.decision.decision import Decision
from router.policies.configured import configured, that_watches
from simulator.traffic.results import ShadowResult


class Shadows:
    """What the policies would have done, in sums."""

    def __init__(self, names: Sequence[str], routing: RoutingSettings) -> None:
        """names: of those that watch."""
        policies = configured(routing)
        self._shadows = {
            name: Shadow(that_watches(routing, policies[name]), routing.guard) for name in names
        }

    def watch(self, decision: Decision) -> None:
        """A decision that is about to be carried out."""
        for shadow in self._shadows.values():
            shadow.watch(decision)

    def results(self) -> dict[str, ShadowResult]:
        """By policy."""
        return {name: _result(shadow) for name, shadow in self._shadows.items()}


def _result(shadow: Shadow) -> ShadowResult:
    told = shadow.decisions
    return ShadowResult(
        decisions=told.total() - told[Agreement.FAILED],
        agreements=told[Agreement.SAME] + told[Agreement.TIED],
        predicted_tokens_more=round(shadow.overlap_tokens.gain - shadow.overlap_tokens.loss),
        predicted_s_sooner=shadow.ttft_s.gain - shadow.ttft_s.loss,
    )
