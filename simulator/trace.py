"""Reads request traces in Mooncake's form, and says how much reuse they allow.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`: one
id for each 512 prompt tokens, the last one perhaps partial. Equal ids mean equal text, so each id
is expanded to 512 token ids that depend on nothing but the id.

Law: two requests whose first k ids are equal have equal token ids as far as both reach into them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from simulator.scheduler import TokenArray

ID_TOKENS = 512
_TOKEN_MASK = np.uint32(0xFFFF)
"""Token ids below 65,536: inside every vocabulary of today."""

SLICE_PATH = Path(__file__).parent / "data" / "mooncake_conversation_slice.jsonl"
"""The slice that ships with the project; data/README.md tells its origin."""

SLICE_TICK_S = 3.0
"""The recorder of that trace stamped arrivals in ticks of this length."""


class TraceError(ValueError):
    """A line that is no request, with its number."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request as the file tells it. Other fields are ignored."""

    timestamp: Annotated[float, Meta(ge=0)]
    """ms since the trace began"""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[Annotated[int, Meta(ge=0)]]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request as it is sent."""

    arrival_s: float
    token_ids: TokenArray
    output_tokens: int
    """At least 1: an engine always samples one."""


def read_trace(
    lines: Iterable[str], *, tick_s: float = 0.0, compression: float = 1.0, seed: int = 0
) -> Iterator[TraceRequest]:
    """Yields a trace's requests in order of arrival. Raises TraceError, with the line's number.

    tick_s: requests with one timestamp are spread over this many seconds after it (never past the
    next timestamp), each at a random place in its own equal share; 0 leaves them together.
    compression: arrival times are divided by it, which restores the rate of a thinned trace.
    """
    rng = np.random.default_rng(seed)
    ticks = groupby(parse_lines(lines), key=lambda line: line.timestamp)
    waiting: list[TraceLine] = []
    for timestamp, group in ticks:
        if waiting:
            room_s = timestamp / 1e3 - waiting[0].timestamp / 1e3
            yield from _spread(waiting, min(tick_s, room_s), compression, rng)
        waiting = list(group)
    if waiting:
        yield from _spread(waiting, tick_s, compression, rng)


def load_slice(compression: float = 1.0) -> list[TraceRequest]:
    """The requests of the slice that ships with the project."""
    with SLICE_PATH.open(encoding="utf-8") as lines:
        return list(read_trace(lines, tick_s=SLICE_TICK_S, compression=compression))


def parse_lines(lines: Iterable[str]) -> Iterator[TraceLine]:
    """Checks and yields the lines; blank ones are skipped. Raises TraceError."""
    decoder = msgspec.json.Decoder(TraceLine)
    previous_ms = 0.0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number}: {error}") from error
        ids_needed = -(-line.input_length // ID_TOKENS)
        if len(line.hash_ids) != ids_needed:
            raise TraceError(
                f"line {number}: input_length {line.input_length} needs {ids_needed} hash_ids of "
                f"{ID_TOKENS} tokens, but there are {len(line.hash_ids)}"
            )
        if line.timestamp < previous_ms:
            raise TraceError(
                f"line {number}: timestamp {line.timestamp:g} is before the last, {previous_ms:g}"
            )
        previous_ms = line.timestamp
        yield line


def expand(hash_ids: Iterable[int], token_count: int) -> TokenArray:
    """Token ids of a prompt: 512 for each id, the last one cut off at `token_count`.

    From numpy's Philox counter keyed by the id; its raw output is the same in every version.
    """
    words = [np.random.Philox(key=one).random_raw(ID_TOKENS // 2) for one in hash_ids]
    return np.concatenate(words).view(np.uint32)[:token_count] & _TOKEN_MASK


def reuse_ceiling(trace: Iterable[TraceRequest], block_size: int) -> float:
    """The best block hit rate that any fleet can reach on a trace, 0 to 1.

    One cache for all, infinite, that knows a prompt as soon as it has arrived:

        sum over requests of usable cached blocks / sum of full prompt blocks

    usable: leading blocks seen before, at most (prompt_tokens - 1) // block_size. The demo measures
    hits in the same unit. An empty trace, or one of prompts shorter than a block: 0.
    """
    seen: set[int] = set()
    hit_blocks = prompt_blocks = 0
    for request in trace:
        chain = _chain(request.token_ids, block_size)
        run = 0
        for block in chain[: (len(request.token_ids) - 1) // block_size]:
            if block not in seen:
                break
            run += 1
        hit_blocks += run
        prompt_blocks += len(chain)
        seen.update(chain)
    return hit_blocks / prompt_blocks if prompt_blocks else 0.0


def _chain(token_ids: TokenArray, block_size: int) -> list[int]:
    chain: list[int] = []
    parent = 0
    content = memoryview(token_ids.tobytes())
    for end in range(4 * block_size, len(content) + 1, 4 * block_size):
        parent = xxh3_64_intdigest(content[end - 4 * block_size : end], parent)
        chain.append(parent)
    return chain


def _spread(
    tick: list[TraceLine], width_s: float, compression: float, rng: np.random.Generator
) -> Iterator[TraceRequest]:
    places = (np.arange(len(tick)) + rng.random(len(tick))) / len(tick) * width_s
    for line, place_s in zip(tick, places.tolist(), strict=True):
        yield TraceRequest(
            arrival_s=(line.timestamp / 1e3 + place_s) / compression,
            token_ids=expand(line.hash_ids, line.input_length),
            output_tokens=max(1, line.output_length),
        )
