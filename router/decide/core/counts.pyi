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
        """The end of a stage."""

    def picked(self, pick: Pick) -> None:
        """A pick was made: it counts, once in every stage."""

    @property
    def took_s(self) -> Mapping[str, float]:
        """Seconds by stage, of the decision at hand."""
