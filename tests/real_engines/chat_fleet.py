"""Two engines of a kind that serve chats, a router, two gateways, and clients of those."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai

from kvroute.v1 import PromptSource
from tests.real_engines.chat_model import BLOCKS, CLASSES, FLAGS
from tests.real_engines.engines import MODEL, Engine, samples
from tests.real_engines.processes import Child
from tests.real_engines.stage import Ground, Stage, StageBroken, a_stage
from tests.stage.prompts.bodies import Body
from tests.stage.waiting import free_ports

FORWARD = ("body", "tokens")
"""What each gateway sends on of a chat."""
LEASE_S = 10.0
"""Of a reservation, so that those of a gateway that was killed end soon."""
SETTLE_S = 4.0
STABLE_S = 0.06
"""Without a fact for so long, all have come."""

log = logging.getLogger("real_engines")


@dataclass
class Answer:
    """A chat's answer as the client has it."""

    text: str
    worker: str
    predicted: int
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Chats:
    """A client of one fleet's gateways."""

    stage: Stage
    gateways: list[Child]
    ports: list[int]
    clients: list[openai.AsyncOpenAI]
    faults: list[str] = field(default_factory=list)
    """What was not as it must be."""

    async def ask(self, body: Body, *, stream: bool = False, gateway: int = 0) -> Answer:
        """One chat through a gateway; raises openai.APIError."""
        return await asked(self.clients[gateway], body, stream=stream)

    async def direct(self, body: Body, engine: Engine, *, stream: bool = False) -> Answer:
        """The same chat, to an engine itself; streamed if the other was, since engines may hold
        back the begin of a tool's call in a stream."""
        url = f"{engine.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asked(client, body, stream=stream)

    async def settle(self, prompt: dict[str, Any], worker: str, size: int) -> None:
        """Waits until the router knows of every block of a prompt, and no fact comes. prompt:
        options of the client."""
        deadline_s = time.monotonic() + SETTLE_S
        facts, since_s = -1, time.monotonic()
        while time.monotonic() < deadline_s:
            explanation = await self.stage.client.explain(**prompt)
            filled = explanation.prompt.count // size * size
            rows = [row for row in explanation.candidates if row.worker_id == worker]
            stats = await self.stage.client.index_stats()
            if stats.facts_applied != facts:
                facts, since_s = stats.facts_applied, time.monotonic()
            is_known = rows and (
                rows[0].overlap_tokens.raw - rows[0].overlap_tokens.predicted >= filled
                or explanation.prompt.source == PromptSource.PROMPT_SOURCE_ESTIMATE
            )
            if is_known and time.monotonic() - since_s >= STABLE_S:
                return
            await asyncio.sleep(0.01)
        log.info("the facts of a chat on %s did not come", worker)

    async def with_tokens(self) -> float:
        """Chats that the gateways sent on with tokens."""
        found = 0.0
        for port in self.ports:
            url = f"http://127.0.0.1:{port}/metrics"
            found += sum(
                await self._values(url, "kvroute_gateway_sent_total", 'kind="with_tokens"')
            )
        return found

    async def metric(self, name: str, label: str = "") -> float:
        """The sum of a family of the router's metrics; label: of samples that have it, as
        `name="value"`."""
        values = await self._values(self.stage.metrics["router"], name, label)
        if not values:
            raise StageBroken(f"the router has no metric {name}")
        return sum(values)

    async def _values(self, url: str, name: str, label: str) -> list[float]:
        return [
            count
            for key, count in (await samples(self.stage.session, url)).items()
            if (key == name or key.startswith(f"{name}{{")) and label in key
        ]


def question(body: Body) -> dict[str, Any]:
    """Options of the router's client for a chat."""
    return {"model": MODEL, "chat_completion_body": json.dumps(body).encode()}


async def asked(client: openai.AsyncOpenAI, body: Body, *, stream: bool) -> Answer:
    """One chat by the openai client, whole or streamed; raises openai.APIError."""
    more = {key: value for key, value in body.items() if key not in ("model", "messages")}
    options: dict[str, Any] = {"model": body["model"], "messages": body["messages"]}
    options |= {"extra_body": more}
    calls = client.chat.completions.with_raw_response
    if not stream:
        raw = await calls.create(**options)
        whole = raw.parse()
        return _answer(raw.headers, _text(whole.choices[0].message), whole.usage)
    raw = await calls.create(**options, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    async for chunk in raw.parse():
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += _text(choice.delta)
    return _answer(raw.headers, text, usage)


def _text(message: Any) -> str:
    """All that the model put out; the name of what holds reasoning differs by engine."""
    parts = [message.content or ""]
    parts += [getattr(message, name, None) or "" for name in ("reasoning", "reasoning_content")]
    for call in message.tool_calls or ():
        parts += [call.function.name or "", call.function.arguments or ""]
    return "".join(parts)


def _answer(headers: Any, text: str, usage: Any) -> Answer:
    if usage is None:
        raise StageBroken("an answer without usage")
    details = usage.prompt_tokens_details
    return Answer(
        text,
        headers.get("x-kvroute-worker", ""),
        int(headers.get("x-kvroute-overlap-tokens", 0)),
        usage.prompt_tokens,
        (details.cached_tokens or 0) if details is not None else 0,
    )


@asynccontextmanager
async def a_fleet(
    kind: str, room: Path, logs: Path, flags: Mapping[str, tuple[str, ...]]
) -> AsyncIterator[Chats]:
    """Two engines behind a router and two gateways. flags: worker id -> more flags of its engine;
    its keys are the workers."""
    config = room / "kvroute.json"
    config.write_text(
        json.dumps(
            {
                "routing": {"lease_s": LEASE_S},
                "models": [{"name": MODEL, "prompts": {"folder": str(room / "model")}}],
            }
        )
    )

    def fleet_of(ground: Ground) -> list[Engine]:
        where = (ground.build, ground.logs, ground.sockets, ground.session)
        return [
            CLASSES[kind](name, *where, blocks=BLOCKS[kind], flags=(*FLAGS[kind], *more))
            for name, more in flags.items()
        ]

    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(
            a_stage(room, logs, fleet_of, ["--config", str(config)])
        )
        first = free_ports(len(FORWARD))
        ports = [first + number for number in range(len(FORWARD))]
        gateways = []
        for number, port in enumerate(ports):
            command = [
                *(sys.executable, "-m", "router.app.main", "gateway", "--router", stage.target),
                *("--listen", f"127.0.0.1:{port}", "--gateway-answer-headers", "true"),
                *("--gateway-forward", FORWARD[number]),
            ]
            gateway = Child(f"gateway-{number}", command, logs)
            stack.push_async_callback(gateway.stop)
            await gateway.start()
            gateways.append(gateway)
        clients = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
                )
            )
            for port in ports
        ]
        chats = Chats(stage, gateways, ports, clients)
        await gateways_ready(chats)
        yield chats
        stage.check_alive()


async def gateways_ready(chats: Chats) -> None:
    """Waits until each gateway has a worker; raises StageBroken."""
    deadline_s = time.monotonic() + 60.0
    for gateway, port in zip(chats.gateways, chats.ports, strict=True):
        while True:
            try:
                async with chats.stage.session.get(f"http://127.0.0.1:{port}/ready") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline_s or not gateway.running:
                raise StageBroken(f"{gateway.name} is not ready\n{gateway.last_words()}")
            await asyncio.sleep(0.05)
