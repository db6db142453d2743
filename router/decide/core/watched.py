"""What the core needs to know of the observers of its decisions. Pure."""

from typing import Protocol

from router.fleet.reservations.reservations import Reservation
from router.request.request import Request


class Watched(Protocol):
    """What observers of decisions need; a reload may change it."""

    @property
    def timed(self) -> bool:
        """Whether every pick is timed, for a timed shadow policy or for replays of the decision
        log; False: only picks of timed policies are.
        """


class PickObserver(Protocol):
    """A feature that is called with each pick, after its reservation."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether the feature needs prompts as tokens; answers then don't invite callers to send
        hashes alone.
        """

    def on_pick(self, reservation: Reservation, request: Request, now_s: float) -> None:
        """Called after a pick; an exception that it raises does not fail the request."""
