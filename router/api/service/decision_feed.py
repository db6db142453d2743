"""The messages of the RPC WatchDecisions: decisions as they are made.

Laws:
- without watchers, a decision costs nothing here; with watchers, at most LOOKED_A_SECOND decisions
  a second are looked at, whatever the watchers want;
- a watcher has WAITING_MAX decisions waiting at most; further decisions are left out and counted.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from kvroute.v1 import fleet_pb2
from router.api.desk.answer_codec import answer_writer
from router.api.service.worker_feed import RETRY_S, WATCHES_MAX
from router.decide.core.core import RouterCore
from router.decide.decision.decision import Decision
from router.decide.policies.first_token import first_token
from router.observe.audit.observers import Watchers
from router.observe.audit.sampling import Sampled
from router.request.refusal import Reason, Refusal, Refused

LOOKED_A_SECOND = 50
"""Decisions looked at in a second, for all watchers together: each costs about 0.3 ms more."""
WAITING_MAX = 256
"""Decisions that wait for one watcher, at most."""
EVERY_S = 0.2
"""Seconds between two messages to a watcher."""
VIEWER = "WatchDecisions"


class DecisionFeed:
    """Sends one router's decisions to the callers of WatchDecisions."""

    def __init__(
        self,
        core: RouterCore,
        watchers: Watchers,
        stopping: asyncio.Event,
        watches_max: int = WATCHES_MAX,
    ) -> None:
        self._writer = answer_writer(core)
        self._watchers = watchers
        self._stopping = stopping
        self._watches_max = watches_max
        self._rng = random.Random()  # for watchers' shares alone
        self._open: list[_Watcher] = []
        self._looked = 0
        """Decisions that were looked at in this second."""
        self._second: asyncio.TimerHandle | None = None

    @property
    def watches(self) -> int:
        """Number of open WatchDecisions calls."""
        return len(self._open)

    async def watch(
        self, request: fleet_pb2.WatchDecisionsRequest, age_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """Yields WatchDecisionsResponses as bytes, the first at once, for age_s seconds (None:
        without end) or until the server stops. Raises Refusal when too many calls are open, and for
        an invalid share.
        """
        if not 0 <= request.share <= 1:
            raise Refusal(
                Reason.INVALID_FIELD,
                f"share is {request.share}; it must be from 0 (all) to 1",
                metadata={"field": "share"},
            )
        if self.watches >= self._watches_max:
            raise Refusal(
                Reason.TOO_MANY_WATCHES,
                f"{self.watches} WatchDecisions calls are open, as many as this router takes",
                RETRY_S,
            )
        loop = asyncio.get_running_loop()
        began_s, watcher = loop.time(), _Watcher(request, self._rng.random)
        self._open.append(watcher)
        if self.watches == 1:
            self._next_second()
        try:
            yield b""  # the caller sees that it watches
            while not self._stopping.is_set() and (age_s is None or loop.time() - began_s < age_s):
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._stopping.wait()
                if message := watcher.take():
                    yield message
        finally:
            self._open.remove(watcher)
            if not self._open:
                self._rest()

    # Looks at decisions

    def _next_second(self) -> None:
        """Has the next LOOKED_A_SECOND decisions looked at, and does so again after a second."""
        self._looked = 0
        self._watchers.look(Sampled(self._on_pick, 1.0, self._on_refusal), VIEWER)
        self._second = asyncio.get_running_loop().call_later(1.0, self._next_second)

    def _rest(self) -> None:
        if self._second is not None:
            self._second.cancel()
            self._second = None
        self._watchers.look(None, VIEWER)

    def _looks(self) -> bool:
        self._looked += 1
        if self._looked <= LOOKED_A_SECOND:
            return True
        self._watchers.look(None, VIEWER)  # until the next second
        for watcher in self._open:
            watcher.limited = True
        return False

    def _on_pick(self, decision: Decision) -> None:
        if not self._looks():
            return
        fitting = [watcher for watcher in self._open if watcher.wants(decision)]
        if fitting:
            made = self._pick(decision)
            for watcher in fitting:
                watcher.add(made)

    def _on_refusal(self, refused: Refused) -> None:
        if not self._looks():
            return
        made = fleet_pb2.WatchedDecision(
            decided_at_s=refused.at_s,
            request_id=refused.request_id,
            model=refused.model,
            prompt_tokens=refused.prompt_tokens,
            refusal=refused.refusal.reason.value,
            message=refused.refusal.message,
            waited_s=refused.waited_s,
        )
        for watcher in self._open:
            if watcher.wants_refusal(refused):
                watcher.add(made)

    def _pick(self, decision: Decision) -> fleet_pb2.WatchedDecision:
        request = decision.request
        made = fleet_pb2.WatchedDecision(
            decided_at_s=decision.decided_at_s,
            request_id=request.request_id,
            model=request.model,
            tenant=request.tenant,
            prompt_tokens=request.prompt.token_count,
            predicted_ttft_s=_predicted_s(decision),
            reservation_id=decision.reservation_id,
            waited_s=decision.waited_s,
        )
        made.receipt.MergeFromString(self._writer.receipt(decision))
        return made


class _Watcher:
    """One WatchDecisions call: its filters, and the decisions that wait to be sent."""

    def __init__(self, request: fleet_pb2.WatchDecisionsRequest, draw: Callable[[], float]) -> None:
        self._request = request
        self._reasons = frozenset(request.reasons)
        self._draw = draw
        self._waiting: deque[fleet_pb2.WatchedDecision] = deque()
        self._left_out = 0
        self.limited = False

    def wants(self, decision: Decision) -> bool:
        wanted = self._request
        picked = decision.sources[decision.order[0]].key.worker_id
        return (
            not self._reasons
            and wanted.model in ("", decision.request.model)
            and wanted.tenant in ("", decision.request.tenant)
            and wanted.worker_id in ("", picked)
            and (not wanted.slower_than_s or _first_token_s(decision) > wanted.slower_than_s)
            and self._drawn()
        )

    def wants_refusal(self, refused: Refused) -> bool:
        wanted = self._request
        return (
            not (wanted.worker_id or wanted.tenant)
            and (not wanted.slower_than_s or refused.waited_s > wanted.slower_than_s)
            and wanted.model in ("", refused.model)
            and (not self._reasons or refused.refusal.reason.value in self._reasons)
            and self._drawn()
        )

    def _drawn(self) -> bool:
        return self._request.share in (0, 1) or self._draw() < self._request.share

    def add(self, decision: fleet_pb2.WatchedDecision) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(decision)
        else:
            self._left_out += 1

    def take(self) -> bytes:
        """A WatchDecisionsResponse, as bytes, with the decisions that wait; empty: there is nothing
        to send."""
        if not (self._waiting or self._left_out or self.limited):
            return b""
        message = fleet_pb2.WatchDecisionsResponse(
            decisions=self._waiting, left_out=self._left_out, limited=self.limited
        )
        self._waiting.clear()
        self._left_out, self.limited = 0, False
        return message.SerializeToString()


def _predicted_s(decision: Decision) -> float:
    """Predicted seconds from the pick to the first token, where the prompt is computed."""
    computing = decision.computing
    return first_token(computing.rows).total_s.item(computing.order[0])


def _first_token_s(decision: Decision) -> float:
    """Predicted seconds from the request's arrival to its first token."""
    return decision.waited_s + _predicted_s(decision)
