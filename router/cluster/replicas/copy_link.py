"""Carries out copies of hot prefixes: sends them to the targets' relays, and records the results.

    HotPrefixes.decide ──> CopyLink ──warm.<worker>.<rank>──> relay ──> HotPrefixes.ended

The decisions bound the copies under way (router/decide/copies/copies.py).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from events.plane import subjects
from events.plane.broker import Broker
from events.plane.facts import Unreadable, Warm, Warmed, decode, encode
from events.plane.tasks import OnFailure, Tasks
from events.relay.warmer import WARM_S
from router.decide.copies.copies import Copy
from router.decide.copies.hot_prefixes import Effect, HotPrefixes

ANSWER_S = WARM_S + 5.0

log = logging.getLogger("kvroute.copies")


@dataclass(kw_only=True, eq=False)
class CopyLink:
    """The copies of hot prefixes that one router replica has begun."""

    broker: Broker
    hot: HotPrefixes
    fleet: str
    replica: str
    clock: Callable[[], float]
    on_failure: InitVar[OnFailure]
    _under_way: dict[Copy, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self, on_failure: OnFailure) -> None:
        self._tasks = Tasks(on_failure)

    async def stop(self) -> None:
        await self._tasks.close()

    def tick(self) -> None:
        """Has HotPrefixes decide about copies, and begins and cancels them."""
        self.perform(self.hot.decide(self.clock()))

    def perform(self, effects: Sequence[Effect]) -> None:
        """Begins and cancels copies, as the effects say."""
        for effect in effects:
            if isinstance(effect, Copy):
                task = self._tasks.spawn_task(self._copy(effect), f"copy to {effect.target}")
                self._under_way[effect] = task
            elif (running := self._under_way.pop(effect.copy, None)) is not None:
                running.cancel()
                self._tasks.spawn(self._take_back(effect.copy), f"no copy to {effect.copy.target}")

    async def _copy(self, copy: Copy) -> None:
        prefix = copy.prefix
        warm = Warm(
            id=self._id(copy),
            tokens=prefix.token_bytes or b"",
            lora_name=prefix.lora_name,
            cache_salt=prefix.cache_salt,
        )
        subject = subjects.warm(self.fleet, copy.target)
        answer = await self.broker.request(subject, encode(warm), ANSWER_S)
        if self._under_way.pop(copy, None) is None:
            return  # cancelled while its answer came: asyncio.wait_for then returns the answer
        trouble = "no answer from its relay"
        if answer is not None:
            warmed = decode(Warmed, answer)
            if isinstance(warmed, Unreadable):
                trouble = f"answer unreadable: {warmed.detail}"
            else:
                trouble = "" if warmed.done else warmed.detail or "its relay gives no reason"
        if trouble:
            log.warning("%d tokens not copied to %s: %s", prefix.token_count, copy.target, trouble)
        else:
            log.info("%d tokens copied to %s", prefix.token_count, copy.target)
        self.hot.ended(copy, not trouble, self.clock())

    async def _take_back(self, copy: Copy) -> None:
        cancel = encode(Warm(id=self._id(copy), cancel=True))
        await self.broker.publish(subjects.warm(self.fleet, copy.target), cancel)

    def _id(self, copy: Copy) -> str:
        return f"{self.replica}-{copy.id}"
