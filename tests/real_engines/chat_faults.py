"""Parts that are killed (-9) while real engines' answers stream through a gateway.

Each function kills one part, says what the client had of its stream, and checks that the next chats
are answered and nothing stays reserved.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from tests.real_engines.chat_fleet import LEASE_S, Chats, gateways_ready
from tests.real_engines.engines import MODEL, Engine
from tests.real_engines.stage import StageBroken

LONG_TOKENS = 3000
"""Of an answer that is cut: more than an engine makes in the seconds that a kill takes."""
MIDDLE_TOKENS = 400
"""Of an answer that goes on without its router."""
CHUNKS_FIRST = 5
NEXT_CHATS = 8
GONE_S = 30.0
"""Until an engine runs nothing, or the router keeps nothing."""
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")

log = logging.getLogger("real_engines")


class Streamed:
    """A long answer, read by a client."""

    def __init__(self, chats: Chats, tokens: int, gateway: int = 0) -> None:
        self._chats, self._tokens, self._gateway = chats, tokens, gateway
        self.chunks = 0
        self.text = ""
        self.worker = ""
        self.ended = ""
        """How: "whole", or the class of the client's error with its text."""
        self.began = asyncio.Event()

    async def run(self) -> None:
        """Reads to the end, whatever it is."""
        try:
            calls = self._chats.clients[self._gateway].chat.completions.with_raw_response
            raw = await calls.create(**long_chat(self._tokens), stream=True)
            self.worker = raw.headers["x-kvroute-worker"]
            async for chunk in raw.parse():
                self.chunks += 1
                self.text += "".join(choice.delta.content or "" for choice in chunk.choices)
                if self.chunks == CHUNKS_FIRST:
                    self.began.set()
            self.ended = "whole"
        except Exception as error:  # of the client or of its HTTP library, as the cut comes
            self.ended = f"{type(error).__name__}: {error}"[:200]
        finally:
            self.began.set()


async def streaming(
    chats: Chats, tokens: int, gateway: int = 0
) -> tuple[Streamed, asyncio.Task[None]]:
    """A long answer of which some chunks have come; raises StageBroken if it has ended."""
    stream = Streamed(chats, tokens, gateway)
    task = asyncio.create_task(stream.run())
    await stream.began.wait()
    if stream.ended:
        raise StageBroken(f"an answer of {tokens} tokens ended at once: {stream.ended}")
    return stream, task


def long_chat(tokens: int) -> dict[str, Any]:
    """Options of the openai client for an answer of so many tokens.

    The penalty keeps a model without trained weights from one token for ever, which may have no
    text; the answer is the same at each call.
    """
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me of the river, at length."}],
        "max_tokens": tokens,
        "temperature": 0,
        "frequency_penalty": 2.0,
        "extra_body": {"ignore_eos": True},
    }


async def all_faults(chats: Chats) -> dict[str, object]:
    """Each fault; what came of it by name."""
    results: dict[str, object] = {}
    faults: dict[str, Callable[[Chats], Awaitable[dict[str, object]]]] = {
        "client left": client_left,
        "engine killed": engine_killed,
        "router killed": router_killed,
        "gateway killed": gateway_killed,
    }
    for name, fault in faults.items():
        results[name] = result = await fault(chats)
        log.info("%s: %s", name, result)
    return results


async def client_left(chats: Chats) -> dict[str, object]:
    """The client goes away in the middle: the engine stops computing."""
    stream, task = await streaming(chats, LONG_TOKENS)
    left_s = time.monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine = chats.stage.engines[stream.worker]
    await idle(engine)
    idle_s = time.monotonic() - left_s
    await nothing_reserved(chats)
    return {"engine_idle_after_s": round(idle_s, 2)}


async def engine_killed(chats: Chats) -> dict[str, object]:
    """The worker dies in the middle of an answer, then while it would be picked."""
    stream, task = await streaming(chats, LONG_TOKENS)
    engine = chats.stage.engines[stream.worker]
    killed_s, killed_at_s = time.monotonic(), time.time()
    await engine.child.kill()
    await task
    told_s = time.monotonic() - killed_s
    if stream.ended == "whole":
        chats.faults.append("engine killed: the client takes the answer for whole")
    next_chats = await ask_again(chats, "engine killed")
    if stream.worker in next_chats:
        chats.faults.append("engine killed: a chat was answered by the dead engine")
    await nothing_reserved(chats)
    await engine.child.start()
    await chats.stage.engine_up(engine)
    await chats.stage.ready(killed_at_s, [stream.worker])
    return {
        "client": stream.ended,
        "chunks": stream.chunks,
        "client_knows_after_s": round(told_s, 2),
        "next_chats_answered": len(next_chats),
        "retries": await retries(chats),
    }


async def router_killed(chats: Chats) -> dict[str, object]:
    """The router dies: the answer goes on, and the gateway picks by itself until it is back."""
    stage = chats.stage
    stream, task = await streaming(chats, MIDDLE_TOKENS)
    killed_at_s = time.time()
    await stage.router.kill()
    await task
    if stream.ended != "whole":
        chats.faults.append(f"router killed: the stream ended with {stream.ended}")
    options = long_chat(MIDDLE_TOKENS)
    url = f"{stage.engines[stream.worker].address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        alone = await client.chat.completions.create(**options)
    if alone.choices[0].message.content != stream.text:
        chats.faults.append("router killed: the text is not the engine's")
    while_away = await ask_again(chats, "router away")
    await stage.router.start()
    await stage.ready(killed_at_s)
    await gateways_ready(chats)
    await ask_again(chats, "router back")
    await nothing_reserved(chats)
    return {
        "client": stream.ended,
        "chunks": stream.chunks,
        "chats_answered_while_away": len(while_away),
        "fallback_picks": await gateway_count(chats, 0, "fallback_picks"),
    }


async def gateway_killed(chats: Chats) -> dict[str, object]:
    """A gateway dies: its client sees it, the engine stops, the reservation's lease ends."""
    stream, task = await streaming(chats, LONG_TOKENS, gateway=1)
    killed_s = time.monotonic()
    await chats.gateways[1].kill()
    await task
    if stream.ended == "whole":
        chats.faults.append("gateway killed: the client takes the answer for whole")
    await idle(chats.stage.engines[stream.worker])
    idle_s = time.monotonic() - killed_s
    answered = await ask_again(chats, "gateway killed")
    await nothing_reserved(chats)
    freed_s = time.monotonic() - killed_s
    await chats.gateways[1].start()
    await gateways_ready(chats)
    return {
        "client": stream.ended,
        "engine_idle_after_s": round(idle_s, 2),
        "reservation_ended_within_s": round(freed_s, 1),
        "lease_s": LEASE_S,
        "next_chats_answered": len(answered),
    }


async def ask_again(chats: Chats, what: str) -> list[str]:
    """The workers of some chats through the first gateway; each must be answered."""
    workers = []
    for number in range(NEXT_CHATS):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{what}, {number}"}],
            "max_tokens": 2,
            "temperature": 0,
        }
        try:
            workers.append((await chats.ask(body)).worker)
        except openai.APIError as error:
            chats.faults.append(f"{what}: a chat failed: {error}"[:300])
    return workers


async def idle(engine: Engine) -> None:
    """Waits until an engine runs nothing; raises StageBroken."""
    async with asyncio.timeout(GONE_S):
        while True:
            running = [
                count
                for line, count in (await engine.metrics()).items()
                if line.startswith(_RUNNING)
            ]
            if not running:
                raise StageBroken(f"{engine.worker_id} does not say how many requests run")
            if not sum(running):
                return
            await asyncio.sleep(0.02)


async def nothing_reserved(chats: Chats) -> None:
    """Waits until the router has no open reservation; a fault if some stay."""
    try:
        async with asyncio.timeout(LEASE_S + GONE_S):
            while await chats.metric("kvroute_reservations"):  # noqa: ASYNC110  # polled over HTTP
                await asyncio.sleep(0.05)
    except TimeoutError:
        chats.faults.append("reservations stay open")


async def retries(chats: Chats) -> float:
    """Second attempts of the first gateway so far."""
    return await gateway_count(chats, 0, "retries")


async def gateway_count(chats: Chats, gateway: int, name: str) -> float:
    """A counter of a gateway's client."""
    url = f"http://127.0.0.1:{chats.ports[gateway]}/metrics"
    async with chats.stage.session.get(url) as answer:
        lines = (await answer.text()).splitlines()
    wanted = f'kvroute_gateway_client_total{{name="{name}"}} '
    values = [line[len(wanted) :] for line in lines if line.startswith(wanted)]
    if not values:
        raise StageBroken(f"the gateway has no counter {name}")
    return float(values[0])
