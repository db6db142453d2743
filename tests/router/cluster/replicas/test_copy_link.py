"""The shell of hot-prefix copies, where an answer and a decision meet."""

import asyncio
from typing import Any, cast

import numpy as np

from events.plane.facts import Warmed, encode
from indexer.identity import WorkerKey
from router.cluster.replicas.copy_link import CopyLink
from router.decide.copies.copies import Cancel, Copy, Prefix
from router.decide.copies.hot_prefixes import HotPrefixes
from router.request.request import Role


class LateBroker:
    """Answers when the test does, and is awaited as nats-py awaits an answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()
        self.taken_back = asyncio.Event()

    async def request(self, _subject: str, _payload: bytes, timeout_s: float) -> bytes:
        self.asked.set()
        return await asyncio.wait_for(self.answer, timeout_s)

    async def publish(self, _subject: str, _payload: bytes) -> bool:
        self.taken_back.set()
        return True


class Decided:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.ended_copies: list[Copy] = []

    def ended(self, copy: Copy, _done: bool, _now_s: float) -> None:
        self.ended_copies.append(copy)


async def test_a_copy_that_is_taken_back_as_its_answer_comes_ends_once_and_quietly() -> None:
    broker, hot = LateBroker(), Decided()
    failures: list[BaseException] = []
    link = CopyLink(
        broker=cast(Any, broker),
        hot=cast(HotPrefixes, hot),
        fleet="fleet",
        replica="a",
        clock=lambda: 0.0,
        on_failure=failures.append,
    )
    chain = np.arange(1, 3, dtype=np.uint64)
    prefix = Prefix(("model", 1), "model", Role.BOTH, 16, chain, None, "", "")
    copy = Copy(1, prefix, WorkerKey("b", 0), WorkerKey("a", 0), benefit_s=1.0, cost_s=0.1)
    link.perform([copy])
    await broker.asked.wait()
    broker.answer.set_result(encode(Warmed(id="a-1", done=True)))
    link.perform([Cancel(copy)])
    await broker.taken_back.wait()
    await link.stop()
    assert failures == []
    assert hot.ended_copies == [], "it was cancelled, and counted as that, before"
