"""What the core needs to know of the observers of its decisions. Pure."""

from typing import Protocol


class Watched(Protocol):
    """How decisions are observed at the moment; a reload may change it."""

    @property
    def timed(self) -> bool:
        """Every pick is timed, for a timed shadow policy or for policies replayed on the decision
        log; False: only picks of timed policies are."""


class Unwatched:
    """No observer needs the times of picks."""

    timed = False
