"""Shadow policies: they score the requests of a run, and never pick. Pure.

Law: a run with shadows has the same results as without.
"""

from router.decide.decision.decision import Decision
from router.decide.policies.configured import that_watches
from router.observe.audit.shadow_policy import Agreement, Shadow
from simulator.traffic.results import ShadowResult
from simulator.world.options import RunOptions


class Shadows:
    """The shadow policies of a run, and the sums of their results."""

    def __init__(self, options: RunOptions) -> None:
        routing, policies = options.routing, options.policies()
        self._shadows = {
            name: Shadow(that_watches(routing, policies[name]), routing.guard)
            for name in options.shadows
        }

    def watch(self, decision: Decision) -> None:
        """Has each shadow policy decide the same request, and counts whether they agree."""
        for shadow in self._shadows.values():
            shadow.watch(decision)

    def results(self) -> dict[str, ShadowResult]:
        """Policy -> result."""
        return {name: _result(shadow) for name, shadow in self._shadows.items()}


def _result(shadow: Shadow) -> ShadowResult:
    decisions = shadow.decisions
    return ShadowResult(
        decisions=decisions.total() - decisions[Agreement.FAILED],
        agreements=decisions[Agreement.SAME] + decisions[Agreement.TIED],
        predicted_tokens_more=round(shadow.overlap_tokens.gain - shadow.overlap_tokens.loss),
        predicted_s_sooner=shadow.ttft_s.gain - shadow.ttft_s.loss,
    )
