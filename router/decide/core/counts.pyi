"""Counts every pick in a PickTally, in C."""

from collections.abc import Mapping

from router.decide.core.progress import Pick
from router.decide.core.tally import PickTally

class Counts:
    """Where a PickTally counts, and a clock for the stages of one decision at a time."""

    tally: PickTally

    def __init__(self, tally: PickTally) -> None: ...
    def begin(self) -> None:
        """A decision begins."""

    def __call__(self, stage: str) -> None:
        """Adds the seconds since the last mark to a stage, which ends."""

    def picked(self, pick: Pick) -> None:
        """Counts a pick, once in every stage."""

    @property
    def took_s(self) -> Mapping[str, float]:
        """Seconds by stage, of the decision at hand."""
