"""Requests of a trace: their arrivals, lengths, and shared text. Pure.

A prompt is given by ids, one for each 512 tokens (or another number, the same for a whole trace);
the last id may stand for fewer. Equal ids mean equal text, for the same model and LoRA. The names
of a prompt's blocks, for virtual runs, and its token ids, for engines that need them, are derived
from the ids alone, and only on demand, since a long trace has a hundred million tokens.

Law: two requests whose first k ids are equal share block hashes, and token ids, as far as both
prompts reach into the text of these ids, and nothing else is shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from simulator.engines.scheduler import TokenArray

ID_TOKENS = 512
"""Tokens of an id, by default."""
_TOKEN_MASK = np.uint32(0xFFFF)
"""Token ids below 65,536: inside every vocabulary of today."""

HashIds = npt.NDArray[np.uint64]

_TICK_S_MIN = 0.1
"""Seconds; finer ticks of time stamps need no spreading."""
_TICK_SHARED = 0.25
_TICK_FITTING = 0.95
_TICK_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """A request as it is sent."""

    arrival_s: float
    """Seconds since the start of the run. For a turn with `think_s`: as recorded."""
    prompt_tokens: int
    output_tokens: int
    """Tokens of the answer, 1 at least: an engine always samples one."""
    hash_ids: HashIds
    session_id: str | None = None
    turn: int = 0
    think_s: float | None = None
    """Seconds from the end of its session's turn before to its sending; None: sent at arrival_s."""
    id_tokens: int = ID_TOKENS
    """Tokens of each of `hash_ids`."""
    priority: int | None = None
    """Higher is sooner, as in a router's API."""
    tenant: str | None = None
    model: str | None = None
    lora_name: str | None = None
    deadline_s: float | None = None
    """Seconds from the arrival to the deadline of the answer, at every rate of the trace."""
    ttft_slo_s: float | None = None
    """Seconds from the arrival within which the first token is good, at every rate of the trace."""
    tpot_slo_s: float | None = None
    """Most seconds between tokens, in the mean, that are good, at every rate of the trace."""

    def block_hashes(self, block_size: int) -> HashIds:
        """A name for each full block, which depends on the text of the block alone.

        Shape (prompt_tokens // block_size,). Raises ValueError unless one of block_size and
        id_tokens divides the other.
        """
        check_block_size(block_size, self.id_tokens)
        block_count = self.prompt_tokens // block_size
        if block_size > self.id_tokens:
            per_block = block_size // self.id_tokens
            return _joined(self.hash_ids[: block_count * per_block].reshape(-1, per_block))
        parts = self.id_tokens // block_size
        # The mix is a bijection, so that two names are equal when id and part are, for ids below
        # 2^55; above, names of different blocks are as likely to be equal as any 64-bit hashes.
        firsts = self.hash_ids[: -(-block_count // parts)] * np.uint64(parts)
        places: HashIds = np.add.outer(firsts, np.arange(parts, dtype=np.uint64))
        return _mix(places.reshape(-1)[:block_count])

    def token_ids(self) -> TokenArray:
        """The prompt's tokens, generated at every call."""
        return expand(self.hash_ids, self.prompt_tokens, self.id_tokens)


class ColumnUse(NamedTuple):
    """The meaning of a column of a trace's file."""

    name: str
    """The file's name of the column."""
    meaning: str
    """The meaning, with its unit; or why it isn't read."""
    is_read: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of their (recorded) arrival. A session's turns are in their order."""

    name: str
    requests: Sequence[TraceRequest]
    tick_s: float = 0.0
    """Length of the ticks of the time stamps, over which arrivals were spread; 0: no ticks."""
    columns: tuple[ColumnUse, ...] = ()
    """The columns of the trace's file, with their meanings."""

    @property
    def is_closed_loop(self) -> bool:
        """Whether some requests wait for others to end."""
        return any(request.think_s is not None for request in self.requests)

    def spread(self, tick_s: float | None = None, seed: int = 0) -> "Trace":
        """The trace with the requests of each time stamp spread over the next `tick_s` seconds.

        Never past the next stamp, each at a random time in its own equal share. tick_s None: the
        result of `detect_tick`; 0: no spreading.
        """
        stamps = np.array([request.arrival_s for request in self.requests])
        if tick_s is None:
            tick_s = detect_tick(stamps)
        if not tick_s:
            return replace(self, tick_s=0.0)
        known, first, share = np.unique(stamps, return_index=True, return_counts=True)
        width = np.minimum(np.diff(known, append=np.inf), tick_s) / share
        rank = np.arange(len(stamps)) - np.repeat(first, share)
        places = rank + np.random.default_rng(seed).random(len(stamps))
        return replace(self._at(stamps + places * np.repeat(width, share)), tick_s=tick_s)

    def window(self, from_s: float = 0.0, until_s: float = np.inf) -> "Trace":
        """The requests that arrive in [from_s, until_s), as a trace that begins at from_s.

        A session's first turn inside is sent at its recorded time; earlier turns are left out.
        """
        begun: set[str] = set()
        kept = []
        for request in self.requests:
            if not from_s <= request.arrival_s < until_s:
                continue
            think_s = request.think_s if request.session_id in begun else None
            if request.session_id is not None:
                begun.add(request.session_id)
            arrival_s = request.arrival_s - from_s
            kept.append(replace(request, arrival_s=arrival_s, think_s=think_s))
        return replace(self, requests=tuple(kept))

    def at_rate(self, rate: float) -> "Trace":
        """The trace with its clock `rate` times faster: arrivals and think times.

        Raises ValueError unless rate is positive.
        """
        if not rate > 0:
            raise ValueError(f"a trace's rate is more than 0, got {rate}")
        faster = [
            replace(
                request,
                arrival_s=request.arrival_s / rate,
                think_s=None if request.think_s is None else request.think_s / rate,
            )
            for request in self.requests
        ]
        return replace(self, requests=tuple(faster))

    def _at(self, arrivals_s: npt.NDArray[np.float64]) -> "Trace":
        moved = [
            replace(request, arrival_s=arrival_s)
            for request, arrival_s in zip(self.requests, arrivals_s.tolist(), strict=True)
        ]
        return replace(self, requests=tuple(moved))


def check_block_size(block_size: int, id_tokens: int = ID_TOKENS) -> None:
    """Raises ValueError unless one of block_size and id_tokens divides the other."""
    if block_size < 1 or (id_tokens % block_size and block_size % id_tokens):
        raise ValueError(
            f"a trace's ids stand for {id_tokens} tokens: blocks of {block_size} are no part and no"
            " multiple of that; choose a power of 2, such as 64"
        )


def served_by(hash_ids: HashIds, model: str | None, lora_name: str | None) -> HashIds:
    """Ids for a model and a LoRA: equal only for equal text, model and LoRA; shape as hash_ids."""
    if model is None and lora_name is None:
        return hash_ids
    key = xxh3_64_intdigest(f"{model or ''}\0{lora_name or ''}".encode())
    return _mix(hash_ids ^ np.uint64(key))


def detect_tick(stamps_s: npt.NDArray[np.float64]) -> float:
    """The length of the ticks of the time stamps, in s; 0: no ticks.

    There are ticks if a quarter of the requests share their stamp and nearly all distances between
    stamps are multiples of the shortest distance, within 2 % of it. stamps_s: ascending.
    """
    known, share = np.unique(stamps_s, return_counts=True)
    if len(known) < 3 or share[share > 1].sum() < _TICK_SHARED * len(stamps_s):
        return 0.0
    gaps = np.diff(known)
    shortest = float(np.percentile(gaps, 1))
    multiples = np.maximum(np.rint(gaps / shortest), 1)
    tick_s = float(np.median(gaps / multiples))
    fitting = np.abs(gaps - multiples * tick_s) <= _TICK_TOLERANCE * tick_s
    return tick_s if tick_s >= _TICK_S_MIN and fitting.mean() >= _TICK_FITTING else 0.0


def expand(
    hash_ids: HashIds | Sequence[int], token_count: int, id_tokens: int = ID_TOKENS
) -> TokenArray:
    """Token ids of a prompt: id_tokens for each id, cut off at `token_count`.

    From numpy's Philox counter keyed by the id; its raw output is the same in every version.
    """
    word_count = -(-id_tokens // 2)
    words = np.stack([np.random.Philox(key=int(key)).random_raw(word_count) for key in hash_ids])
    tokens = words.view(np.uint32)[:, :id_tokens].reshape(-1)
    return tokens[:token_count] & _TOKEN_MASK


def _joined(rows: HashIds) -> HashIds:
    """A name for each row of ids, which depends on their order."""
    names = np.zeros(len(rows), np.uint64)
    for ids in rows.T:
        names = _mix(names ^ ids)
    return names


def _mix(values: HashIds) -> HashIds:
    """The finalizer of SplitMix64, a bijection. Source: Steele, Lea, Flood, OOPSLA 2014."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
