"""The refusal of a request that no candidate can take."""

from dataclasses import dataclass

from router.decide.decision.decision import Decision
from router.request.refusal import Refusal


@dataclass(eq=False)
class NobodyFits(Refusal):
    """A refusal of a request whose workers were weighed."""

    decision: Decision | None = None
    """The candidates; of a pair, the half for which no worker fits."""
