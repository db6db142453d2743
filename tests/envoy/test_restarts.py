"""Two pickers behind a real Envoy that stop, restart and die with 200 answers under way."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.envoy.replicas import Fleet, a_fleet
from tests.stage.gateway import Worker
from tests.stage.waiting import until

STREAMS = 200
ACCEPT_S = "5"
"""Longer than Envoy's checks of health, which come every second."""
WORDS = [
    b"data: " + json.dumps({"choices": [{"delta": {"content": f"token {n}"}}]}).encode() + b"\n\n"
    for n in range(20)
]
DONE = b"data: [DONE]\n\n"
DIGEST = hashlib.sha256(b"".join([*WORDS, DONE])).hexdigest()


class Held:
    """A worker's answers: half of each, and the rest when the test says so."""

    def __init__(self) -> None:
        self.began = 0
        """Answers of which a client has the first bytes."""
        self.go_on = asyncio.Event()

    async def play(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in WORDS[:10]:
            await response.write(chunk)
        if b"short" not in body:
            await self.go_on.wait()
        for chunk in [*WORDS[10:], DONE]:
            await response.write(chunk)
        return response


async def ask(fleet: Fleet, user: str, held: Held | None = None) -> str:
    """`whole`, `cut`, or the status of an answer that is none. held: counts its beginning."""
    body: dict[str, Any] = {"model": "m", "stream": True, "user": user}
    body["messages"] = [{"role": "user", "content": f"hello {user}"}]
    try:
        async with fleet.post(body) as answer:
            content = await answer.content.readany()
            if held is not None:
                held.began += 1
            content += await answer.read()
    except aiohttp.ClientError:
        return "cut"
    if answer.status != 200:
        return str(answer.status)
    return "whole" if hashlib.sha256(content).hexdigest() == DIGEST else "cut"


async def streams(fleet: Fleet, held: Held, group: asyncio.TaskGroup) -> list[asyncio.Task[str]]:
    """As many answers, half of each at its client."""
    before = held.began
    tasks = [group.create_task(ask(fleet, f"held {n}", held)) for n in range(STREAMS)]
    await until(lambda: held.began == before + STREAMS, "all answers have begun")
    return tasks


async def several(fleet: Fleet, count: int = 40) -> set[str]:
    return set(await asyncio.gather(*(ask(fleet, f"short {n}") for n in range(count))))


async def none_refused(fleet: Fleet) -> None:
    """Until no request is refused: Envoy's worker learns of a lost picker a little after its
    administration tells of it, and refuses what it gives that picker until then."""
    async with asyncio.timeout(60.0):
        while await several(fleet) != {"whole"}:
            pass


async def test_a_rolling_restart_cuts_no_answer_and_refuses_none(tmp_path: Path) -> None:
    held = Held()
    flags = {"requests-accept-after-stop-s": ACCEPT_S}
    async with (
        a_fleet(tmp_path, Worker(held.play), Worker(held.play), **flags) as fleet,
        asyncio.TaskGroup() as group,
    ):
        for replica in fleet.replicas:
            held.go_on.clear()
            tasks = await streams(fleet, held, group)
            replica.terminate()
            assert await several(fleet) == {"whole"}  # while its health is still believed
            await fleet.healthy(replica, is_healthy=False)
            assert await several(fleet) == {"whole"}
            held.go_on.set()
            assert set(await asyncio.gather(*tasks)) == {"whole"}
            assert await replica.ended() == 0
            assert await several(fleet) == {"whole"}
            await replica.start()
            await fleet.healthy(replica)
        assert await several(fleet) == {"whole"}
        await fleet.idle()


async def test_a_killed_picker_cuts_its_own_answers_alone(tmp_path: Path) -> None:
    held = Held()
    async with (
        a_fleet(tmp_path, Worker(held.play), Worker(held.play)) as fleet,
        asyncio.TaskGroup() as group,
    ):
        for replica in fleet.replicas:
            await fleet.healthy(replica)
        tasks = await streams(fleet, held, group)
        carried = [await fleet.requests(replica) for replica in fleet.replicas]
        through = max(carried)
        dead = fleet.replicas[carried.index(through)]
        await dead.kill()
        await fleet.healthy(dead, is_healthy=False)
        await none_refused(fleet)
        held.go_on.set()
        results = await asyncio.gather(*tasks)
        assert results.count("cut") + results.count("whole") == STREAMS
        # One of the dead picker's streams may have been Envoy's check of its health.
        assert through - 1 <= results.count("cut") <= through


async def test_a_killed_picker_cuts_no_answer_that_goes_around_it(tmp_path: Path) -> None:
    held = Held()
    one = Worker(held.play)
    async with (
        a_fleet(tmp_path, one, replicas=1, shows_answers=False) as fleet,
        asyncio.TaskGroup() as group,
    ):
        tasks = await streams(fleet, held, group)
        await fleet.replicas[0].kill()
        held.go_on.set()
        assert set(await asyncio.gather(*tasks)) == {"whole"}
