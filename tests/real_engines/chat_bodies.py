"""Anthropic's messages and OpenAI's responses through the gateways, each twice, and conversations
of the openai client: tokens and cached tokens as predicted."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvroute.v1 import PromptSource
from router.fleet.reservations.reservations import FINISH_REASONS
from router.request.bodies import MESSAGES, RESPONSES, BodyFormat
from tests.real_engines.chat_fleet import Chats
from tests.real_engines.engines import MODEL
from tests.stage.prompts import bodies, responses
from tests.stage.prompts.bodies import Body

CONVERSATIONS = 10
TURNS = 4
OUTPUT_TOKENS = 4
REPORTED_S = 10.0
"""From a client's last answer until the router has the gateways' last report."""


@dataclass(frozen=True)
class Bodies:
    """Bodies of one format, and what their answers report."""

    kind: BodyFormat
    named: Mapping[str, Body]
    random: Callable[[random.Random], Body]
    count: int
    """Random ones, beside those with a name."""
    usage: Callable[[Body], tuple[int, int]]
    """The tokens of the prompt, and the cached ones among them."""
    more: Body


def _of_messages(usage: Body) -> tuple[int, int]:
    cached = usage.get("cache_read_input_tokens") or 0
    stored = usage.get("cache_creation_input_tokens") or 0
    return usage["input_tokens"] + cached + stored, cached


def _of_responses(usage: Body) -> tuple[int, int]:
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"] or 0


ALL = (
    Bodies(MESSAGES, bodies.MESSAGES, bodies.random_messages, 40, _of_messages, {}),
    Bodies(
        RESPONSES,
        responses.RESPONSES,
        responses.random_response,
        210,
        _of_responses,
        {"max_output_tokens": OUTPUT_TOKENS},
    ),
)


async def all_bodies(chats: Chats, given: Bodies, seed: int) -> dict[str, object]:
    """Every body twice in a row, by one gateway and then the other."""
    rng = random.Random(seed)
    mixes = [(f"random {number}", given.random(rng)) for number in range(given.count)]
    counts = dict.fromkeys(("sent", "exact", "refused", "local", "engine", "estimate", "cached"), 0)
    for name, body in [*given.named.items(), *mixes]:
        body = {**body, **given.more, "model": MODEL}
        for gateway in (0, 1):
            counts["sent"] += 1
            told = (await chats.stage.client.explain(**_question(given.kind, body))).prompt
            counts[PromptSource.Name(told.source).removeprefix("PROMPT_SOURCE_").lower()] += 1
            answer = await _sent(chats, given.kind, body, gateway)
            if answer is None:
                counts["refused"] += 1
                continue
            worker, predicted, usage = answer
            prompt, cached = given.usage(usage)
            counts["cached"] += cached
            if told.source == PromptSource.PROMPT_SOURCE_ESTIMATE:
                continue
            counts["exact"] += predicted == cached
            if (predicted, told.count) != (cached, prompt):
                chats.faults.append(
                    f"{given.kind.name} {name}, {gateway}: {told.count} tokens and {predicted}"
                    f" cached of ours, {prompt} and {cached} of the engine's"
                )
            size = chats.stage.engines[worker].block_size
            await chats.settle(_question(given.kind, body), worker, size)
    return counts


def _question(kind: BodyFormat, body: Body) -> dict[str, Any]:
    return {"model": MODEL, kind.option: json.dumps(body).encode()}


async def _sent(
    chats: Chats, kind: BodyFormat, body: Body, gateway: int
) -> tuple[str, int, Body] | None:
    """The worker, its predicted cached tokens, and the usage that it reports; None: the engine
    refuses the body."""
    url = f"http://127.0.0.1:{chats.ports[gateway]}{kind.paths[0]}"
    async with chats.stage.session.post(url, json=body) as answer:
        content, head = await answer.json(content_type=None), answer.headers
        if answer.status != 200:
            if answer.status != 400 or "X-Kvroute-Worker" not in head:
                chats.faults.append(f"{kind.name}: {answer.status} {content}")
            return None
        return head["X-Kvroute-Worker"], int(head["X-Kvroute-Overlap-Tokens"]), content["usage"]


async def conversations(chats: Chats, seed: int) -> dict[str, int]:
    """Conversations by the openai client's responses, half of them streamed: each turn sends on
    what the client has read of the turns before. Why each ended is what the gateways report."""
    rng = random.Random(seed)
    counts = {"turns": 0, "exact": 0, "cached": 0}
    before, ended = await _reasons(chats), Counter[str]()
    for number in range(CONVERSATIONS):
        items: list[Body] = []
        for _ in range(TURNS):
            items.append({"role": "user", "content": bodies.a_text(rng)})
            body: Body = {
                "model": MODEL,
                "input": items,
                "instructions": "You are careful.",
                "tools": responses.FUNCTIONS,
                "max_output_tokens": 2 * OUTPUT_TOKENS,
                "prompt_cache_key": f"conversation-{number}",
                "store": False,
            }
            gateway = number % 2
            raw = await chats.clients[gateway].responses.with_raw_response.create(
                **body, stream=number >= CONVERSATIONS // 2
            )
            response: Any = raw.parse()
            if number >= CONVERSATIONS // 2:
                async for event in response:
                    last = event
                response = last.response
            counts["turns"] += 1
            ended[_why(response)] += 1
            worker = raw.headers["x-kvroute-worker"]
            predicted = int(raw.headers["x-kvroute-overlap-tokens"])
            cached = response.usage.input_tokens_details.cached_tokens
            counts["cached"] += cached
            counts["exact"] += predicted == cached
            if predicted != cached:
                chats.faults.append(
                    f"conversation {number}: {predicted} cached tokens predicted, {cached} reported"
                )
            size = chats.stage.engines[worker].block_size
            await chats.settle(_question(RESPONSES, body), worker, size)
            items += [item.model_dump(exclude_none=True) for item in response.output]
    end_s = time.monotonic() + REPORTED_S
    reported = await _reasons(chats) - before
    while reported != ended and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
        reported = await _reasons(chats) - before
    if reported != ended:
        chats.faults.append(f"responses that ended by {ended}, reported as {reported}")
    return counts | {f"ended by {reason}": count for reason, count in ended.items()}


def _why(response: Any) -> str:
    if response.incomplete_details is not None:
        return "length"
    kinds = {item.type for item in response.output}
    return "tool_calls" if "function_call" in kinds else "stop"


async def _reasons(chats: Chats) -> Counter[str]:
    """Finished requests by why they ended, as reported to the router."""
    name = "kvroute_reservations_ended_total"
    return Counter(
        {why: int(await chats.metric(name, f'finish_reason="{why}"')) for why in FINISH_REASONS}
    )
