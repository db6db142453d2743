"""Which requests an engine computes next, and what comes of it. Pure: `now_s` in, effects out.

A scheduler of vLLM's shape: one step computes at most `step_tokens_max` tokens. Running requests
come first, one token each or the next chunk of their prompt; then waiting ones in order of arrival,
while tokens, slots and blocks last. A request waits until its whole prompt fits, since two
half-admitted prompts could block one another. When a running request finds no block, the one that
came last gives up its blocks and starts over ("preempted by recompute").

Laws:
- the first in line always gets on: no request waits for ever, and none is lost;
- KV of a token exists once it has been computed, so never for the last token of an answer;
- a block is announced when the step that fills it begins, and told when that step ends.

A caller runs it as  step = begin_step(now) -> wait until step.end_s -> end_step(now).

*Joined steps.* While all running requests decode and nobody can be admitted, consecutive steps
differ only in their number, so up to `joined_steps_max` are done as one, at their average price;
`cut_step` shortens the run when somebody comes. What this changes: blocks that the run will fill
are taken when it begins, and told when it ends. 1 turns it off.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil

import numpy as np
import numpy.typing as npt
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from simulator.block_pool import BlockId, BlockPool, PoolEvent, Stored
from simulator.cost_model import LLAMA_8B_H100, CostModel, PrefillChunk

TokenArray = npt.NDArray[np.uint32]


class RequestRefused(ValueError):
    """The client's mistake, in one sentence."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. Defaults: vLLM's on an H100-class GPU."""

    block_count: int
    block_size: int = 16
    max_model_len: int = 0
    """Tokens of prompt and answer; 0: what the pool holds."""
    max_num_seqs: int = 256
    step_tokens_max: int = 8192
    joined_steps_max: int = 1
    vocabulary: int = 128_256
    hash_seed: int = 0
    """Two engines with different seeds name the same block differently."""
    cost: CostModel = LLAMA_8B_H100
    lora_names: tuple[str, ...] = ()

    @property
    def model_len(self) -> int:
        return self.max_model_len or self.block_count * self.block_size

    def __post_init__(self) -> None:
        if self.model_len > self.block_count * self.block_size:
            raise ValueError(
                f"max_model_len {self.model_len} exceeds the pool of "
                f"{self.block_count} blocks of {self.block_size} tokens"
            )
        if min(self.max_num_seqs, self.step_tokens_max, self.joined_steps_max) < 1:
            raise ValueError(
                "max_num_seqs, step_tokens_max and joined_steps_max must be at least 1"
            )


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    0 <= computed_tokens < known_tokens <= len(token_ids) while it lives: the last known token is
    the one that the next step computes.
    """

    request_id: str
    token_ids: TokenArray
    """Prompt, and the answer that it will get: a model is a function of its prompt."""
    prompt_tokens: int
    known_tokens: int
    arrival_s: float
    cache_salt: str = ""
    lora_name: str = ""
    session_id: str | None = None
    computed_tokens: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    stored_count: int = 0
    """Leading blocks whose content the pool knows."""
    cached_tokens: int | None = None
    """Found in the cache at the first admission; None: not admitted yet."""
    first_token_s: float | None = None
    scheduled_s: float | None = None
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return self.known_tokens - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        return len(self.token_ids) - self.known_tokens

    @property
    def finished(self) -> bool:
        return self.known_tokens == len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is computing: `count` equal steps on end."""

    start_s: float
    single_s: float
    count: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.single_s * self.count


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request: sequence.token_ids[first:last]."""

    sequence: Sequence
    first: int
    last: int
    finished: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """Effects of a step: tokens for the clients, events for the subscribers."""

    outputs: list[Output]
    events: list[PoolEvent]


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine tells about itself; counters are totals since its start."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    finished: int
    aborted: int

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1; reclaimable cache is not in it."""
        return self.used_blocks / self.total_blocks


Answer = Callable[[TokenArray, int, SchedulerConfig, str], TokenArray]
"""(prompt, max_tokens, config, LoRA name) -> token ids of the answer, max_tokens of them."""


def greedy_answer(
    prompt: TokenArray, max_tokens: int, config: SchedulerConfig, lora_name: str
) -> TokenArray:
    """An answer that depends on the prompt only, as greedy sampling would on any engine."""
    key = xxh3_64_intdigest(prompt.tobytes() + lora_name.encode())
    words = np.random.Philox(key=key).random_raw(max_tokens)
    return (words % np.uint64(config.vocabulary)).astype(np.uint32)


class Scheduler:
    """The queue, the running batch and the block pool of one engine."""

    def __init__(self, config: SchedulerConfig, answer: Answer = greedy_answer) -> None:
        self.config = config
        self.pool = BlockPool(config.block_count, config.block_size)
        self._answer = answer
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._scheduled: list[tuple[Sequence, int]] = []
        """Sequences of the step that is going on, with the tokens it computes of each."""
        self._step: Step | None = None
        self._root_hash = xxh3_64_intdigest(b"root", config.hash_seed)
        self._names = count()
        self.newest_arrival_s = 0.0
        self._queried_tokens = self._hit_tokens = self._preemptions = 0
        self._prompt_tokens = self._generated_tokens = self._finished = self._aborted = 0

    @override
    def __repr__(self) -> str:
        running, waiting = len(self._running), len(self._waiting)
        return f"<Scheduler {running} running, {waiting} waiting, {self.pool!r}>"

    @property
    def step(self) -> Step | None:
        """The step that is going on."""
        return self._step

    def load(self) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self.pool.in_use_count,
            total_blocks=self.pool.block_count,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=self._finished,
            aborted=self._aborted,
        )

    def add(
        self,
        prompt: TokenArray,
        max_tokens: int,
        now_s: float,
        *,
        cache_salt: str = "",
        lora_name: str = "",
        session_id: str | None = None,
    ) -> Sequence:
        """Puts a request at the end of the queue. Raises RequestRefused."""
        if not len(prompt):
            raise RequestRefused("the prompt is empty")
        if max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, got {max_tokens}")
        if len(prompt) + max_tokens > self.config.model_len:
            raise RequestRefused(
                f"the model's maximum length is {self.config.model_len} tokens, but the prompt has "
                f"{len(prompt)} and up to {max_tokens} are asked for"
            )
        if lora_name and lora_name not in self.config.lora_names:
            raise RequestRefused(f"no such LoRA: {lora_name}")
        answer = self._answer(prompt, max_tokens, self.config, lora_name)
        sequence = Sequence(
            request_id=f"r{next(self._names)}",
            token_ids=np.concatenate([prompt, answer]),
            prompt_tokens=len(prompt),
            known_tokens=len(prompt),
            arrival_s=now_s,
            cache_salt=cache_salt,
            lora_name=lora_name,
            session_id=session_id,
        )
        self._waiting.append(sequence)
        self.newest_arrival_s = max(self.newest_arrival_s, now_s)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request, gives its blocks back; False when it has already ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
        else:
            return False
        self._release(sequence)
        self._aborted += 1
        return True

    def cached_tokens(self, prompt: TokenArray, cache_salt: str = "", lora_name: str = "") -> int:
        """What a request would find in the cache if it were admitted now. Changes nothing."""
        length = len(prompt)
        asked = Sequence("", prompt, length, length, 0.0, cache_salt, lora_name)
        self._hash_up_to(asked, length)
        return len(self.pool.find_prefix(asked.hashes, length)) * self.config.block_size

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing changed, while requests hold blocks."""
        return self.pool.reset()

    def begin_step(self, now_s: float) -> Step | None:
        """Decides what to compute next and takes the blocks for it; None when there is nothing."""
        if self._step is not None:
            raise RuntimeError("a step is going on")
        budget = self.config.step_tokens_max
        preemptions = self._preemptions
        i = 0
        while i < len(self._running) and budget:
            sequence = self._running[i]
            tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
            if self._grow_or_preempt(sequence, tokens):
                self._schedule(sequence, tokens)
                budget -= tokens
                i += 1
        if self._preemptions == preemptions:
            self._admit(budget, now_s)
        if not self._scheduled:
            return None
        self._step = self._price(now_s)
        return self._step

    def cut_step(self, now_s: float) -> Step | None:
        """Shortens joined steps to the end of the one going on; returns the step as it is now."""
        step = self._step
        if step is not None and step.count > 1:
            begun = ceil((now_s - step.start_s) / step.single_s)
            self._step = Step(step.start_s, step.single_s, min(max(begun, 1), step.count))
        return self._step

    def end_step(self, now_s: float) -> StepResult:
        """Applies the step: tokens come out, requests finish, events are told."""
        if self._step is None:
            raise RuntimeError("no step is going on")
        steps = self._step.count
        outputs: list[Output] = []
        for sequence, tokens in self._scheduled:
            if not sequence.blocks:
                continue  # aborted while the step was going on
            sequence.computed_tokens += tokens
            if sequence.computed_tokens < sequence.known_tokens:
                continue  # more of the prompt to come
            first = sequence.known_tokens
            sequence.known_tokens += steps
            if steps > 1:
                sequence.computed_tokens += steps - 1
                self._store_full_blocks(sequence, sequence.computed_tokens)
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
                self._prompt_tokens += sequence.prompt_tokens
            self._generated_tokens += steps
            outputs.append(Output(sequence, first, sequence.known_tokens, sequence.finished))
            if sequence.finished:
                self._running.remove(sequence)
                self._release(sequence)
                self._finished += 1
        self._scheduled.clear()
        self._step = None
        return StepResult(outputs, self.pool.take_events())

    def _grow_or_preempt(self, sequence: Sequence, tokens: int) -> bool:
        """Makes room for `tokens` more; False when the sequence itself had to give way."""
        while not self._grow(sequence, sequence.computed_tokens + tokens):
            victim = self._running.pop()
            self._release(victim)
            victim.computed_tokens = 0
            victim.preemptions += 1
            self._preemptions += 1
            self._waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, budget: int, now_s: float) -> None:
        while self._waiting and budget and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            self._hash_up_to(sequence, sequence.known_tokens)
            reused = self.pool.find_prefix(sequence.hashes, sequence.known_tokens)
            whole = self._blocks_for(sequence.known_tokens) - len(reused)
            if not self.pool.fits(reused, whole):
                return
            computed = len(reused) * self.config.block_size
            tokens = min(sequence.known_tokens - computed, budget)
            fresh = self.pool.take(reused, self._blocks_for(computed + tokens) - len(reused))
            if fresh is None:
                raise RuntimeError(f"room for a whole prompt, but not for a part: {self.pool!r}")
            sequence.blocks = [*reused, *fresh]
            sequence.stored_count = len(reused)
            sequence.computed_tokens = computed
            if sequence.cached_tokens is None:  # recomputing after a preemption is no query
                sequence.cached_tokens = computed
                sequence.scheduled_s = now_s
                self._queried_tokens += sequence.prompt_tokens
                self._hit_tokens += computed
            self._waiting.popleft()
            self._running.append(sequence)
            self._schedule(sequence, tokens)
            budget -= tokens

    def _schedule(self, sequence: Sequence, tokens: int) -> None:
        self._store_full_blocks(sequence, sequence.computed_tokens + tokens)
        self._scheduled.append((sequence, tokens))

    def _price(self, now_s: float) -> Step:
        """The step's duration; joins steps where that changes nothing but their number."""
        prefill: list[PrefillChunk] = []
        decoding = context = 0
        for sequence, tokens in self._scheduled:
            if sequence.output_tokens and sequence.computed_tokens + 1 == sequence.known_tokens:
                decoding += 1
                context += sequence.computed_tokens
            else:
                prefill.append(PrefillChunk(tokens, sequence.computed_tokens))
        steps = 1
        if not prefill and decoding == len(self._running):
            steps = self._join()
        mean_context = context + decoding * (steps - 1) / 2
        return Step(now_s, self.config.cost.step_s(prefill, decoding, mean_context), steps)

    def _join(self) -> int:
        """How many decode steps can be done as one; takes the blocks that they will fill."""
        steps = min(
            self.config.joined_steps_max, min(one.remaining_tokens for one in self._running)
        )
        needed = sum(
            self._blocks_for(one.computed_tokens + steps) - len(one.blocks) for one in self._running
        )
        if steps == 1 or not self.pool.fits((), needed):
            return 1
        for one in self._running:
            self._grow(one, one.computed_tokens + steps)
        return steps

    def _grow(self, sequence: Sequence, token_count: int) -> bool:
        missing = self._blocks_for(token_count) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.take((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def _blocks_for(self, token_count: int) -> int:
        return -(-token_count // self.config.block_size)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_count = 0

    def _store_full_blocks(self, sequence: Sequence, token_count: int) -> None:
        """Announces the blocks that are full with the first `token_count` tokens."""
        first, last = sequence.stored_count, token_count // self.config.block_size
        if last <= first:
            return
        self._hash_up_to(sequence, token_count)
        size = self.config.block_size
        lora_name = sequence.lora_name or None
        told = Stored(
            hashes=tuple(sequence.hashes[first:last]),
            parent=sequence.hashes[first - 1] if first else None,
            token_ids=tuple(sequence.token_ids[first * size : last * size].tolist()),
            extra_keys=tuple(_extra_keys(sequence, i) for i in range(first, last)),
            lora_name=lora_name,
            lora_id=self.config.lora_names.index(lora_name) + 1 if lora_name else None,
            session_id=sequence.session_id,
        )
        self.pool.store(sequence.blocks[first:last], told)
        sequence.stored_count = last

    def _hash_up_to(self, sequence: Sequence, token_count: int) -> None:
        """The engine's own name of each full block: a chain over parent, tokens, LoRA and salt."""
        first, last = len(sequence.hashes), token_count // self.config.block_size
        if last <= first:
            return
        size, seed = self.config.block_size, self.config.hash_seed
        parent = sequence.hashes[-1] if first else self._root_hash
        tokens = memoryview(sequence.token_ids[first * size : last * size].tobytes())
        suffix = b"\0lora\0" + sequence.lora_name.encode() if sequence.lora_name else b""
        salt = b"\0salt\0" + sequence.cache_salt.encode() if sequence.cache_salt else b""
        for i in range(last - first):
            block = tokens[4 * size * i : 4 * size * (i + 1)]
            own = suffix + salt if first + i == 0 else suffix
            parent = xxh3_64_intdigest(b"".join((parent.to_bytes(8, "big"), block, own)), seed)
            sequence.hashes.append(parent)


def _extra_keys(sequence: Sequence, block_index: int) -> tuple[str, ...] | None:
    """As vLLM tells them: LoRA name with every block, salt with the first one only."""
    salt = sequence.cache_salt if block_index == 0 else ""
    return tuple(key for key in (sequence.lora_name, salt) if key) or None
