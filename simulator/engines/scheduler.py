"""What all simulated schedulers share: requests, steps, and their effects. Pure.

A caller runs a scheduler with  step = begin_step(now) -> wait until step.end_s -> end_step(now),
and may call add and abort at any time. The scheduler decides which requests a step computes
(simulator/schedulers/). The caller decides how fast time passes: an asyncio shell on sockets
(simulator/live/engine.py) or the virtual world (simulator/world/world.py).

Caches depend on tokens only by the hash of each full block, so a scheduler knows the `Content` of a
sequence and no token ids (simulator/engines/content.py).

Laws:
- no request waits for ever, and none is lost: added = finished + aborted + waiting + running;
- KV of a token exists once it has been computed, so never for the last token of an answer;
- blocks add up: free + cached + in use = total;
- the events of all steps, applied in order, give the contents of the caches.

*Joined steps.* While consecutive steps differ only in their number, up to `joined_steps_max` of
them are joined to a run. `cut_step` shortens the run when a request comes or goes, and `advance`
applies its steps that have ended by now. Tokens, blocks, events and times equal those of single
steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from indexer.identity import Tier
from simulator.engines.block_pool import BlockId, PoolEvent, Stored
from simulator.engines.cost_model import CostModel, Distance
from simulator.engines.decode_run import DecodeRun
from simulator.engines.profile import load_profile

TokenArray = npt.NDArray[np.uint32]


class RequestRefused(ValueError):
    """The engine refuses a request: a mistake of the client, which the message says."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and prices that every engine has. Defaults: vLLM's on an H100-class GPU."""

    block_count: int
    block_size: int = 16
    max_model_len: int = 0
    """Tokens of prompt and answer; 0: as many as the pool holds."""
    max_num_seqs: int = 256
    step_tokens_max: int = 8192
    joined_steps_max: int = 1
    hash_seed: int = 0
    """Engines with different seeds have different hashes of the same block."""
    cost: CostModel = field(default_factory=load_profile("llama-8b-h100").cost_model)
    lora_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: "SchedulerConfig") -> Self:
        """`config` itself if it is of this class; else its common options, with this class's
        defaults for all other options."""
        if isinstance(config, cls):
            return config
        common = (option.name for option in fields(SchedulerConfig))
        return cls(**{name: getattr(config, name) for name in common})

    @property
    def priority_sign(self) -> int:
        """1 or -1: a request with a smaller priority * priority_sign goes first."""
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
    """Interface: a sequence as caches see it, a prompt with its future answer, block by block."""

    def hashes(self, block_count: int) -> list[int]:
        """Names of the first `block_count` full blocks, or more. Callers must not change the
        list."""

    def stored(self, first: int, last: int) -> Stored:
        """The event that the blocks at places first <= i < last are on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as an engine receives it."""

    request_id: str
    content: Content
    prompt_tokens: int
    output_tokens: int
    """Tokens of its answer."""
    max_tokens: int | None = None
    """Longest answer that the request allows, in tokens: all that a scheduler knows of the length.
    None: output_tokens."""
    priority: int | None = None
    """Priority in the engine's own order; None: the request has none."""
    lora_name: str = ""
    session_id: str | None = None
    dp_rank: int | None = None
    """The rank that shall serve it; None: the engine chooses."""
    remote_tokens: int = 0
    """Leading tokens of the prompt whose KV another engine sends once there are blocks for it."""
    remote_distance: Distance = Distance.RACK
    """Distance of the engine that sends the KV."""

    @property
    def longest_answer(self) -> int:
        """Most tokens that the answer may have."""
        return self.output_tokens if self.max_tokens is None else self.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine.

    Law: 0 <= computed_tokens < known_tokens <= total_tokens while it lives. The next step computes
    the last known token.
    """

    submission: Submission
    known_tokens: int
    """Tokens of the prompt, and of the answer so far."""
    arrival_s: float
    computed_tokens: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    stored_count: int = 0
    """Leading blocks whose content the pool knows."""
    cached_tokens: int | None = None
    """Tokens reused from the cache at the first admission; None: not admitted yet."""
    first_token_s: float | None = None
    scheduled_s: float | None = None
    preemptions: int = 0
    prompt_tokens: int = field(init=False)
    total_tokens: int = field(init=False)
    """Tokens of the prompt, and of the whole answer."""

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
        """Tokens of the answer so far."""
        return self.known_tokens - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.total_tokens - self.known_tokens

    @property
    def finished(self) -> bool:
        return self.known_tokens == self.total_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is computing: `count` consecutive steps that differ only in their number."""

    start_s: float
    end_s: float
    count: int = 1


class Output(NamedTuple):
    """New tokens of one request: places first <= i < last, counted from the prompt's first
    token."""

    sequence: Sequence
    first: int
    last: int
    finished: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """Effects of a step: tokens for the clients, events for the subscribers."""

    outputs: list[Output]
    events: list[PoolEvent]


@dataclass
class Counts:
    """An engine's counters: totals since its start."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_queried_tokens: int = 0
    """Tokens missing on the device and looked up on the host or at another engine."""
    external_hit_tokens: int = 0
    """Tokens loaded from the host or from another engine."""
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    drafted_tokens: int = 0
    """Drafted tokens verified by steps."""
    accepted_tokens: int = 0

    def looked_up(self, sequence: Sequence, cached: int, external: int | None = None) -> None:
        """Counts a request's lookup in the caches when it is first admitted, and no later lookup.

        cached: its tokens on the device. external: tokens loaded from the host or from another
        engine; None: there was no lookup there.
        """
        if sequence.cached_tokens is not None:
            return
        sequence.cached_tokens = min(cached + (external or 0), sequence.known_tokens - 1)
        self.prefix_queried_tokens += sequence.prompt_tokens
        self.prefix_hit_tokens += cached
        if external is not None:
            self.external_queried_tokens += sequence.prompt_tokens - cached
            self.external_hit_tokens += external

    def first_token(self, sequence: Sequence, now_s: float) -> None:
        """Counts a request's prompt tokens when its first token is out."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self.prompt_tokens += sequence.prompt_tokens


@dataclass(kw_only=True)
class Load(Counts):
    """An engine's metrics: its counters, and its present load in requests and blocks."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    deferred: int = 0
    """Waiting requests that the last step passed over, since they wait for KV cache or for their
    LoRA's place in a step."""

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1, without reclaimable cache."""
        return self.used_blocks / self.total_blocks


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Numbers of blocks by state: free + cached + in_use = total."""

    free: int
    cached: int
    in_use: int
    total: int


class Scheduler(ABC):
    """The queue, the running batch and the cache of one engine, and its joined steps.

    A subclass for each engine decides on a step, takes its blocks and applies its results.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.newest_arrival_s = 0.0
        self.step: Step | None = None
        """The step that is going on; None: the engine is idle."""
        self._run: DecodeRun | None = None
        """The joined steps that are going on; None: the step is a single one."""
        self._begun = self._ended = 0
        """Joined steps whose blocks are taken; joined steps whose tokens are out."""

    @property
    @abstractmethod
    def next_ready_s(self) -> float | None:
        """Time at which the next request that waits for KV cache will be ready; None: none waits
        for it. A caller whose `begin_step` returned None calls it again then; a step that is going
        on takes this time into account by itself."""

    @abstractmethod
    def running(self) -> list[Sequence]:
        """The batch, in the scheduler's order. For checks."""

    @abstractmethod
    def waiting(self) -> list[Sequence]:
        """Waiting requests, next first. For checks."""

    @abstractmethod
    def scheduled(self) -> list[tuple[Sequence, int]]:
        """The requests of the present step, each with its tokens in the step. For checks."""

    @abstractmethod
    def load(self, dp_rank: int = 0) -> Load:
        """The metrics of a rank."""

    @abstractmethod
    def blocks(self, dp_rank: int = 0) -> BlockCounts:
        """A rank's blocks by state. May take time in proportion to the pool: for checks."""

    @abstractmethod
    def contents(self, dp_rank: int = 0) -> Iterable[tuple[Tier, int]]:
        """(tier, hash) of each cached block of a rank: what all events so far, and those at the end
        of the present step, must add up to. For checks."""

    @abstractmethod
    def abort(self, sequence: Sequence) -> bool:
        """Forgets a request, gives its blocks back; False when it has already ended.

        Call `cut_step` before: else other requests get these blocks only at the end of the joined
        steps. Call `begin_step` afterwards if no step is going on, since a request may have waited
        for these blocks."""

    @abstractmethod
    def cached_tokens(self, submission: Submission) -> int:
        """Tokens that a request would reuse if it were admitted now. Changes nothing."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing changed, while requests hold blocks."""

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Puts a new request into the queue. Raises RequestRefused."""
        check(submission, self.config)
        sequence = self._enqueue(submission, now_s)
        self.newest_arrival_s = max(self.newest_arrival_s, now_s)
        return sequence

    def begin_step(self, now_s: float) -> Step | None:
        """Decides on the next step and takes its blocks; None when no request can be computed."""
        if self.step is not None:
            raise RuntimeError("a step is going on")
        self._run = None
        self._begun, self._ended = 1, 0
        self.step = self._decide(now_s)
        return self.step

    def cut_step(self, now_s: float) -> Step | None:
        """Shortens joined steps to those that have begun; returns the shortened step, None when no
        step is going on."""
        step, run = self.step, self._run
        if step is not None and run is not None:
            steps = max(run.begun(now_s, step.count), self._begun)
            self.step = Step(step.start_s, run.end_s(steps), steps)
        return self.step

    def advance(self, now_s: float) -> StepResult:
        """Applies the joined steps that have ended by now, except for the last; the rest go on.
        Afterwards load, contents and events are those of now. If no step is going on: returns the
        events since the last step, such as those of a reset, or of blocks that a transfer from
        another engine has displaced."""
        step, run = self.step, self._run
        if step is None:
            return StepResult([], self._take_events())
        ended = 0 if run is None else run.ended(now_s, step.count - 1)
        if ended <= self._ended:
            return StepResult([], [])
        outputs = self._go_on(ended, now_s)
        events = self._take_events()
        self._begin(ended + 1)
        return StepResult(outputs, events)

    def end_step(self, now_s: float) -> StepResult:
        """Applies the step: tokens come out, requests finish, events are published."""
        if self.step is None:
            raise RuntimeError("no step is going on")
        outputs = self._end(self.step.count, now_s)
        self.step = None
        return StepResult(outputs, self._take_events())

    def _begin(self, target: int) -> None:
        """Takes the blocks of the joined steps up to the `target`-th."""
        if target > self._begun:
            self._take_blocks(self._begun - self._ended, target - self._begun)
            self._begun = target

    def _go_on(self, ended: int, now_s: float) -> list[Output]:
        """Applies the joined steps up to the `ended`-th; returns their new tokens."""
        self._begin(ended)
        steps = ended - self._ended
        self._ended = ended
        return self._apply(steps, now_s)

    @abstractmethod
    def _enqueue(self, submission: Submission, now_s: float) -> Sequence:
        """Puts a request into the queue. Raises RequestRefused."""

    @abstractmethod
    def _decide(self, now_s: float) -> Step | None:
        """Decides on the next step and takes the blocks of its first one; sets `_run` if the step
        joins several. None when no request can be computed."""

    @abstractmethod
    def _take_blocks(self, begun: int, steps: int) -> None:
        """Takes the blocks of `steps` more joined steps. begun: number of joined steps before these
        whose blocks are taken and whose tokens are not out."""

    @abstractmethod
    def _apply(self, steps: int, now_s: float) -> list[Output]:
        """Applies `steps` more joined steps; returns their new tokens."""

    def _end(self, count: int, now_s: float) -> list[Output]:
        """Applies the step that ends; returns its new tokens. count: number of its joined steps."""
        return self._go_on(count, now_s)

    @abstractmethod
    def _take_events(self) -> list[PoolEvent]:
        """The events since the last call, in order."""


def check(submission: Submission, config: SchedulerConfig) -> None:
    """Raises RequestRefused for a request that no engine accepts."""
    max_tokens = submission.longest_answer
    if not submission.prompt_tokens:
        raise RequestRefused("the prompt is empty")
    if max_tokens < 1:
        raise RequestRefused(f"max_tokens must be at least 1, got {max_tokens}")
    if submission.prompt_tokens + max_tokens > config.model_len:
        raise RequestRefused(
            f"the model's maximum length is {config.model_len} tokens, but the prompt has "
            f"{submission.prompt_tokens} and its answer up to {max_tokens}"
        )
    if submission.lora_name and submission.lora_name not in config.lora_names:
        raise RequestRefused(f"no such LoRA: {submission.lora_name}")
