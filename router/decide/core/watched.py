"""What the core needs to know of the observers of its decisions. Pure."""

from typing import Protocol

from router.fleet.reservations.reservations import Reservation
from router.request.request import Request


class Watched(Protocol):
    """How decisions are observed at the moment; a reload may change it."""

    @property
    def timed(self) -> bool:
        """Every pick is timed, for a timed shadow policy or for policies replayed on the decision
        log; False: only picks of timed policies are."""


class Unwatched:
    """No observer needs the times of picks."""

    timed = False


class PickObserver(Protocol):
    """A feature that learns of each pick, after its reservation."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether it needs prompts as tokens; answers then invite no one to send hashes alone."""

    def on_pick(self, reservation: Reservation, request: Request, now_s: float) -> None:
        """What it raises takes no answer away."""
