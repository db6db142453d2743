"""The content of sequences (prompt and answer), as caches see it. Pure.

Each block of a sequence has a name: equal names mean equal text from the beginning on. Live engines
make the names of token ids; virtual runs have names alone, since no client reads their text.
"""

from collections.abc import Callable
from itertools import count
from typing import TypedDict, Unpack

import numpy as np
from xxhash import xxh3_64_intdigest

from simulator.engines.block_pool import Stored
from simulator.engines.scheduler import Scheduler, SchedulerConfig, Sequence, Submission, TokenArray

VOCABULARY = 128_256

Answer = Callable[[TokenArray, int, str], TokenArray]
"""(prompt, max_tokens, LoRA name) -> token ids of the answer, max_tokens of them."""

_names = count()


def random_tokens(key: int, count: int) -> TokenArray:
    """Random token ids below VOCABULARY, the same for the same key; shape (count,)."""
    words = np.random.Philox(key=key).random_raw(count)
    return (words % np.uint64(VOCABULARY)).astype(np.uint32)


def greedy_answer(prompt: TokenArray, max_tokens: int, lora_name: str) -> TokenArray:
    """An answer that depends on prompt and LoRA only, as with greedy sampling on any engine."""
    return random_tokens(xxh3_64_intdigest(prompt.tobytes() + lora_name.encode()), max_tokens)


class TokenContent:
    """A sequence's token ids, and the engine's hash of each block: over the hash of the block
    before, the block's tokens, the LoRA and the cache salt."""

    def __init__(
        self,
        token_ids: TokenArray,
        config: SchedulerConfig,
        *,
        cache_salt: str = "",
        lora_name: str = "",
        session_id: str | None = None,
    ) -> None:
        self.token_ids = token_ids
        """The prompt, and its answer, which is a function of the prompt."""
        self._block_size = config.block_size
        self._seed = config.hash_seed
        self._cache_salt = cache_salt
        self._lora_name = lora_name
        self._lora_id = config.lora_names.index(lora_name) + 1 if lora_name else None
        self._session_id = session_id
        self._hashes: list[int] = []

    def hashes(self, block_count: int) -> list[int]:
        hashes = self._hashes
        size, first = self._block_size, len(hashes)
        last = min(block_count, len(self.token_ids) // size)
        if last <= first:
            return hashes
        parent = hashes[-1] if first else xxh3_64_intdigest(b"root", self._seed)
        tokens = memoryview(self.token_ids[first * size : last * size].tobytes())
        suffix = b"\0lora\0" + self._lora_name.encode() if self._lora_name else b""
        salt = b"\0salt\0" + self._cache_salt.encode() if self._cache_salt else b""
        for i in range(last - first):
            block = tokens[4 * size * i : 4 * size * (i + 1)]
            own = suffix + salt if first + i == 0 else suffix
            hashed = b"".join((parent.to_bytes(8, "big"), block, own))
            parent = xxh3_64_intdigest(hashed, self._seed)
            hashes.append(parent)
        return hashes

    def stored(self, first: int, last: int) -> Stored:
        hashes, size = self.hashes(last), self._block_size
        return Stored(
            hashes=tuple(hashes[first:last]),
            parent=hashes[first - 1] if first else None,
            token_ids=tuple(self.token_ids[first * size : last * size].tolist()),
            extra_keys=tuple(self._extra_keys(i) for i in range(first, last)),
            lora_name=self._lora_name or None,
            lora_id=self._lora_id,
            session_id=self._session_id,
        )

    def _extra_keys(self, block_index: int) -> tuple[str, ...] | None:
        """Keys as in vLLM's events: LoRA name with every block, salt with the first block only."""
        salt = self._cache_salt if block_index == 0 else ""
        return tuple(key for key in (self._lora_name, salt) if key) or None


class ChainContent:
    """A sequence without tokens: given names of the prompt's blocks, new names for the answer's.

    No two requests share an answer: its blocks, and a block that holds the prompt's end and the
    answer's beginning, get names that depend on the request alone.
    """

    def __init__(self, prompt_hashes: list[int], request_id: str) -> None:
        """prompt_hashes: a name for each full block of the prompt and all text before it."""
        self._hashes = list(prompt_hashes)
        self._own = xxh3_64_intdigest(request_id.encode())

    def hashes(self, block_count: int) -> list[int]:
        hashes = self._hashes
        while len(hashes) < block_count:
            place = len(hashes).to_bytes(8, "little")
            hashes.append(xxh3_64_intdigest(place, self._own))
        return hashes

    def stored(self, first: int, last: int) -> Stored:
        hashes = self.hashes(last)
        parent = hashes[first - 1] if first else None
        return Stored(tuple(hashes[first:last]), parent, (), ())


class About(TypedDict, total=False):
    """Optional fields of a request of token ids: those of Submission, and the cache salt."""

    cache_salt: str
    lora_name: str
    session_id: str | None
    remote_tokens: int


def token_submission(
    prompt: TokenArray,
    max_tokens: int,
    config: SchedulerConfig,
    answer: Answer = greedy_answer,
    **about: Unpack[About],
) -> tuple[Submission, TokenContent]:
    """The submission of a prompt of token ids, and its content, with the answer's tokens.

    answer: makes the answer. about: see About.
    """
    lora_name, session_id = about.get("lora_name", ""), about.get("session_id")
    # No scheduler takes a longer answer than fits into model_len, so no more tokens are made.
    length = max(min(max_tokens, config.model_len - len(prompt)), 0)
    content = TokenContent(
        np.concatenate([prompt, answer(prompt, length, lora_name)]),
        config,
        cache_salt=about.get("cache_salt", ""),
        lora_name=lora_name if lora_name in config.lora_names else "",
        session_id=session_id,
    )
    submission = Submission(
        request_id=f"r{next(_names)}",
        content=content,
        prompt_tokens=len(prompt),
        output_tokens=max_tokens,
        lora_name=lora_name,
        session_id=session_id,
        remote_tokens=about.get("remote_tokens", 0),
    )
    return submission, content


def add_tokens(
    scheduler: Scheduler,
    prompt: TokenArray,
    max_tokens: int,
    now_s: float,
    answer: Answer = greedy_answer,
    **about: Unpack[About],
) -> Sequence:
    """Puts a prompt into a scheduler's queue. Raises RequestRefused."""
    submission, _ = token_submission(prompt, max_tokens, scheduler.config, answer, **about)
    return scheduler.add(submission, now_s)
