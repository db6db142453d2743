"""What every simulated scheduler has in common: requests in, steps out, effects at their end. Pure.

A caller runs one as  step = begin_step(now) -> wait until step.end_s -> end_step(now), and may call
add and abort at any time. Which requests a step computes is the scheduler's own business
(simulator/schedulers/); how fast time passes is the caller's: an asyncio shell on sockets
(simulator/live/engine.py) or the virtual world (simulator/world/world.py).

What tokens a sequence has matters to caches only by the hash of each full block, so a scheduler
knows its `Content` and no token ids (simulator/engines/content.py).

Laws:
- no request waits for ever, and none is lost: added = finished + aborted + waiting + running;
- KV of a token exists once it has been computed, so never for the last token of an answer;
- blocks add up: free + cached + in use = total;
- the events of all steps, applied in order, give the contents of the caches.

*Joined steps.* While consecutive steps differ only in their number, up to `joined_steps_max` of
them are done as one run; `cut_step` shortens the run when somebody comes or goes, and `advance`
applies the steps of it that have ended by now. Tokens, blocks, events and times are those of the
steps done one by one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from indexer.identity import Tier
from simulator.engines.block_pool import BlockId, PoolEvent, Stored
from simulator.engines.cost_model import CostModel, Distance
from simulator.engines.profile import load_profile

TokenArray = npt.NDArray[np.uint32]


class RequestRefused(ValueError):
    """The client's mistake, in one sentence."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits that every engine has. Defaults: vLLM's on an H100-class GPU."""

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
    cost: CostModel = field(default_factory=load_profile("llama-8b-h100").cost_model)
    lora_names: tuple[str, ...] = ()

    @property
    def priority_sign(self) -> int:
        """priority * priority_sign is smaller for whom comes sooner."""
        return -1

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


class Content(Protocol):
    """What a sequence is made of, as caches see it: prompt, and the answer that it will get."""

    def hashes(self, block_count: int) -> list[int]:
        """The names of at least the first `block_count` full blocks. Nobody may change the list."""

    def stored(self, first: int, last: int) -> Stored:
        """The news that blocks first <= i < last are on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as an engine gets it."""

    request_id: str
    content: Content
    prompt_tokens: int
    output_tokens: int
    """What it will bring out."""
    max_tokens: int | None = None
    """What it may bring out, all that a scheduler knows beforehand. None: output_tokens."""
    priority: int | None = None
    """In the engine's own direction."""
    lora_name: str = ""
    session_id: str | None = None
    dp_rank: int | None = None
    """The rank that shall serve it; None: the engine chooses."""
    ready_s: float = 0.0
    """It isn't computed before: its grammar is being compiled. Engines that have no such state
    begin at once."""
    input_ready_s: float = 0.0
    """The same for a session whose input is still streaming in; it holds a slot of the batch."""
    remote_tokens: int = 0
    """Leading tokens of the prompt whose KV another engine has, and sends once blocks are found."""
    remote_distance: Distance = Distance.RACK
    """How far that engine is."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    0 <= computed_tokens < known_tokens <= total_tokens while it lives: the last known token is the
    one that the next step computes.
    """

    submission: Submission
    known_tokens: int
    """Of the prompt, and of the answer so far."""
    arrival_s: float
    computed_tokens: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    stored_count: int = 0
    """Leading blocks whose content the pool knows."""
    cached_tokens: int | None = None
    """Found in the cache at the first admission; None: not admitted yet."""
    first_token_s: float | None = None
    scheduled_s: float | None = None
    preemptions: int = 0
    prompt_tokens: int = field(init=False)
    total_tokens: int = field(init=False)
    """Of the prompt, and of the whole answer."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.submission.prompt_tokens
        self.total_tokens = self.prompt_tokens + self.submission.output_tokens

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def content(self) -> Content:
        return self.submission.content

    @property
    def output_tokens(self) -> int:
        """Of the answer so far."""
        return self.known_tokens - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.total_tokens - self.known_tokens

    @property
    def finished(self) -> bool:
        return self.known_tokens == self.total_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is computing: `count` steps on end that differ only in their number."""

    start_s: float
    end_s: float
    count: int = 1


class Output(NamedTuple):
    """New tokens of one request: from place `first` to before `last`, prompt included."""

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
    deferred: int = 0
    """Of the waiting: those whom the last step passed over, since they wait for something else
    than their turn, or for a LoRA's."""
    external_queried_tokens: int = 0
    """Not found on the device, looked for on the host or asked of another engine."""
    external_hit_tokens: int = 0
    """Of these, found and loaded."""
    drafted_tokens: int = 0
    """Verified by steps."""
    accepted_tokens: int = 0

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1; reclaimable cache is not in it."""
        return self.used_blocks / self.total_blocks


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + cached + in_use = total."""

    free: int
    cached: int
    in_use: int
    total: int


class Scheduler(Protocol):
    """The queue, the running batch and the cache of one engine."""

    config: SchedulerConfig
    newest_arrival_s: float

    @property
    def step(self) -> Step | None:
        """The step that is going on."""

    @property
    def next_ready_s(self) -> float | None:
        """When the next of those who wait for something else than their turn (KV cache on its way,
        a grammar, more input) will be ready. An engine whose `begin_step` found nothing to do tries
        again then; a step that is going on needs no care."""

    def running(self) -> list[Sequence]:
        """The batch, in the scheduler's order. For checks."""

    def waiting(self) -> list[Sequence]:
        """Those who wait, next one first. For checks."""

    def scheduled(self) -> list[tuple[Sequence, int]]:
        """Whom the step that is going on computes, with the tokens of each. For checks."""

    def load(self, dp_rank: int = 0) -> Load:
        """What one rank tells about itself."""

    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        """Of one rank. May take time in proportion to the pool: for checks."""

    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        """What one rank's cache holds: the oracle of the events told so far and of those to come
        at the end of the step. For checks."""

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Takes a request in. Raises RequestRefused."""

    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request, gives its blocks back; False when it has already ended.

        Cut joined steps first, or who waits for these blocks gets them at the end of the run; and
        let an idle engine begin a step, for somebody may have waited for nothing else."""

    def cached_tokens(self, submission: Submission) -> int:
        """What a request would find in the cache if it were admitted now. Changes nothing."""

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing changed, while requests hold blocks."""

    def begin_step(self, now_s: float) -> Step | None:
        """Decides what to compute next and takes the blocks for it; None when there is nothing."""

    def cut_step(self, now_s: float) -> Step | None:
        """Shortens joined steps to the end of the one going on; returns the step as it is now."""

    def advance(self, now_s: float) -> StepResult:
        """Applies those of the joined steps that have ended by now, but not the last; the rest go
        on. So what is asked between is true: load, contents, events."""

    def end_step(self, now_s: float) -> StepResult:
        """Applies the step: tokens come out, requests finish, events are told."""


def check(submission: Submission, config: SchedulerConfig) -> None:
    """Raises RequestRefused for what no engine takes."""
    max_tokens = (
        submission.output_tokens if submission.max_tokens is None else submission.max_tokens
    )
    if not submission.prompt_tokens:
        raise RequestRefused("the prompt is empty")
    if max_tokens < 1:
        raise RequestRefused(f"max_tokens must be at least 1, got {max_tokens}")
    if submission.prompt_tokens + max_tokens > config.model_len:
        raise RequestRefused(
            f"the model's maximum length is {config.model_len} tokens, but the prompt has "
            f"{submission.prompt_tokens} and up to {max_tokens} are asked for"
        )
    if submission.lora_name and submission.lora_name not in config.lora_names:
        raise RequestRefused(f"no such LoRA: {submission.lora_name}")
