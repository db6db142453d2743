"""Reads a prefill worker's answer, the hand-over of KV blocks to the decode worker, within bounds.

Law: whatever the worker answers, and however slowly, reading ends within HAND_OVER_S with a JSON
object or one of the exceptions NO_HAND_OVER.
"""

import asyncio
from typing import Any

import aiohttp
import msgspec

from kvroute.client import UnusableAnswer

ANSWER_MAX = 1 << 21
"""Most bytes of an answer, which lists the blocks of a prompt: 300 KiB for a million tokens. To
parse a longer one would hold up other requests."""
HAND_OVER_S = 1.0
"""Seconds from the answer's head to its end, at most."""
NO_HAND_OVER = (
    aiohttp.ClientError, OSError, UnusableAnswer, msgspec.DecodeError, UnicodeError, RecursionError,
)  # fmt: skip
"""Exceptions for an answer that is no hand-over; TimeoutError is one of them, as an OSError."""


async def read(content: aiohttp.StreamReader) -> dict[str, Any]:
    """Reads a prefill worker's answer as a JSON object; raises one of NO_HAND_OVER."""
    text = bytearray()
    async with asyncio.timeout(HAND_OVER_S):
        while chunk := await content.readany():
            text += chunk
            if len(text) > ANSWER_MAX:
                raise UnusableAnswer(f"the prefill worker's answer is over {ANSWER_MAX} bytes")
    return msgspec.json.decode(text, type=dict[str, Any])
