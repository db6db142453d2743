"""Anthropic's messages through the gateways, each twice: tokens and cached tokens as predicted."""

import json
import random
from typing import Any

from kvroute.v1 import PromptSource
from tests.real_engines.chat_fleet import Chats
from tests.real_engines.engines import MODEL
from tests.stage.prompts.bodies import MESSAGES, Body, random_messages

COUNT = 40
"""Random ones, beside those with a name."""


async def all_messages(chats: Chats, seed: int) -> dict[str, object]:
    """Every body twice in a row, by one gateway and then the other."""
    rng = random.Random(seed)
    mixes = [(f"random {number}", random_messages(rng)) for number in range(COUNT)]
    counts = {"messages": 0, "exact": 0, "local": 0, "engine": 0, "estimate": 0, "cached": 0}
    for name, body in [*MESSAGES.items(), *mixes]:
        body = {**body, "model": MODEL}
        for gateway in (0, 1):
            counts["messages"] += 1
            told = (await chats.stage.client.explain(**_question(body))).prompt
            counts[PromptSource.Name(told.source).removeprefix("PROMPT_SOURCE_").lower()] += 1
            worker, predicted, usage = await _sent(chats, body, gateway)
            cached = usage.get("cache_read_input_tokens") or 0
            prompt = usage["input_tokens"] + cached
            counts["cached"] += cached
            if told.source == PromptSource.PROMPT_SOURCE_ESTIMATE:
                continue
            counts["exact"] += predicted == cached
            if (predicted, told.count) != (cached, prompt):
                chats.faults.append(
                    f"messages {name}, {gateway}: {told.count} tokens and {predicted} cached of"
                    f" ours, {prompt} and {cached} of the engine's"
                )
            size = chats.stage.engines[worker].block_size
            await chats.settle(_question(body), worker, size)
    return dict(counts)


def _question(body: Body) -> dict[str, Any]:
    return {"model": MODEL, "messages_body": json.dumps(body).encode()}


async def _sent(chats: Chats, body: Body, gateway: int) -> tuple[str, int, Body]:
    """The worker, its predicted cached tokens, and the usage that it reports."""
    url = f"http://127.0.0.1:{chats.ports[gateway]}/v1/messages"
    async with chats.stage.session.post(url, json=body) as answer:
        content = await answer.json(content_type=None)
        if answer.status != 200:
            chats.faults.append(f"messages: {answer.status} {content}")
            return "", 0, {"input_tokens": 0}
        head = answer.headers
        worker, predicted = head["X-Kvroute-Worker"], int(head["X-Kvroute-Overlap-Tokens"])
        return worker, predicted, content["usage"]
