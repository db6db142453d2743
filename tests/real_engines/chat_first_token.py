"""What tokens beside the messages are worth: time to the first token of a long chat, cached."""

import time
from statistics import median

from tests.real_engines.chat_fleet import FORWARD, Chats
from tests.real_engines.engines import MODEL
from tests.stage.prompts.bodies import Body

WORDS = 1_600
REPEATS = 9


async def first_tokens(chats: Chats) -> dict[str, float]:
    """Milliseconds, median, by what the gateway sends on; the gateways take turns."""
    text = " ".join(f"word{number % 97}" for number in range(WORDS))
    message = {"role": "user", "content": text}
    body: Body = {"model": MODEL, "messages": [message], "max_tokens": 2, "temperature": 0}
    taken: dict[str, list[float]] = {name: [] for name in FORWARD}
    for repeat in range(REPEATS + 1):
        for client, name in zip(chats.clients, FORWARD, strict=True):
            began_s = time.monotonic()
            stream = await client.chat.completions.create(**body, stream=True)
            async for _ in stream:
                break
            if repeat:  # the first fills the cache
                taken[name].append((time.monotonic() - began_s) * 1e3)
            await stream.close()
    prompt = await chats.ask({**body, "max_tokens": 1})
    shown: dict[str, float] = {name: round(median(values), 1) for name, values in taken.items()}
    return {"prompt_tokens": prompt.prompt_tokens, **shown}
