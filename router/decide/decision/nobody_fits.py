"""The refusal of a request that no candidate can take."""

from dataclasses import dataclass

from router.decide.decision.decision import Decision
from router.request.refusal import Refusal


@dataclass(eq=False)
class NobodyFits(Refusal):
    """A refusal of a request that no worker of its pool can take."""

    decision: Decision | None = None
    """The decision without a pick; for a pair, about the half for which no worker fits."""
