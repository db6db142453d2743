"""Decides when the fallback picks in the place of routers, and reports to the fallback the requests
whose ends or load it must know.

Law: without a fallback, or without a usable list of workers, no method here takes over.
"""

import logging
import math
from collections.abc import Callable

from kvroute.client.errors import KvRouteError, NoWorker, RouterUnreachable
from kvroute.client.fallback.fallback import Fallback, Key
from kvroute.client.messages.options import RouteBytes
from kvroute.client.messages.pick import Pick
from kvroute.v1 import FailureReason, Progress, ProgressOutcome, ProgressResult

log = logging.getLogger("kvroute.client")


class Takeover:
    """One client's fallback, if it has one."""

    def __init__(
        self, fallback: Fallback | None, *, silent_s: float, clock: Callable[[], float]
    ) -> None:
        """silent_s: seconds for which a router has been silent when it first counts as silent."""
        self.fallback = fallback
        self._silent_s = silent_s
        self._clock = clock
        self._picked = 0
        """The fallback's picks since a router answered."""

    def line_wait_s(self) -> float:
        """Longest that a request waits for a line before the fallback picks, seconds; inf: no
        fallback."""
        fallback = self.fallback
        if fallback is None or not fallback.usable(self._clock()):
            return math.inf
        return max(fallback.policy.patience_s, 0.001)

    def replaces_silent(self) -> bool:
        """Whether the fallback picks now, while the best router is silent."""
        fallback = self.fallback
        now_s = self._clock()
        if fallback is None or not fallback.usable(now_s):
            return False
        fallback.unreachable(now_s - self._silent_s)  # the silence began at that time
        return fallback.unreachable(now_s)

    def ends_retries(self, error: KvRouteError) -> bool:
        """Whether the fallback picks after this error, in the place of more attempts."""
        fallback = self.fallback
        if fallback is None:
            return False
        now_s = self._clock()
        if isinstance(error, RouterUnreachable):
            return fallback.unreachable(now_s) and fallback.usable(now_s)
        # A router that has just restarted knows no workers for a moment.
        return isinstance(error, NoWorker) and fallback.outage and fallback.usable(now_s)

    def pick(self, request: RouteBytes, error: KvRouteError) -> Pick | None:
        """The fallback's pick in the place of an error; None: the error stands."""
        fallback = self.fallback
        if fallback is None or not (isinstance(error, RouterUnreachable) or fallback.outage):
            return None
        answer = fallback.pick(request.message(), self._clock())
        if answer is None:
            return None
        if self._picked == 0:
            log.warning(
                "no router answers: requests go to the workers that were listed last, without"
                " knowledge of caches and load, until a router answers: %s",
                error,
            )
        self._picked += 1
        log.debug("no router: the client picked %s: %s", answer.worker_id, error)
        return Pick(request.request_id, answer, fallback=True)

    def routed(self) -> bool:
        """Records that a router answered; returns whether to list the workers now."""
        if self._picked:
            log.warning("a router answers again, after %d picks without one", self._picked)
            self._picked = 0
        return self.fallback is not None and self.fallback.routed(self._clock())

    def began(self, pick: Pick) -> None:
        """Records a request that was sent to the worker of a router's pick."""
        if self.fallback is not None and not pick.fallback:
            self.fallback.began(_key_of(pick))

    def ended(self, pick: Pick, failure: FailureReason.ValueType | None, refused: bool) -> None:
        """Records the end of a request of a router's pick; failure: None if it succeeded."""
        if self.fallback is not None and not pick.fallback:
            self.fallback.ended(_key_of(pick), self._clock(), failure, refused=refused)

    def reported(self, progress: Progress) -> ProgressOutcome:
        """The outcome of a step about one of the fallback's own picks, which no router knows."""
        if self.fallback is not None:
            self.fallback.reported(progress, self._clock())
        return ProgressOutcome(
            reservation_id=progress.reservation_id, result=ProgressResult.PROGRESS_RESULT_APPLIED
        )


def _key_of(pick: Pick) -> Key:
    return pick.response.worker_id, pick.response.dp_rank
