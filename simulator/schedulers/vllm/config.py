"""The options of vLLM's scheduler, and its state of a request. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig, Sequence


@dataclass(frozen=True, slots=True)
class VllmConfig(SchedulerConfig):
    """Limits and choices of one engine. Names and defaults: those of vLLM 0.32, if it has the
    setting."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    """priority: the lowest value first, of equals the earliest request."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """The most tokens of a prompt in a step while there are other requests; 0: no such limit."""
    scheduler_reserve_full_isl: bool = True
    """Whether a request waits until its whole prompt fits, or only until its first chunk fits."""
    watermark: float = 0.0
    """Share of the blocks that an admission leaves idle while other requests run."""
    max_loras: int = 1
    """Most different LoRAs in a step."""
    num_speculative_tokens: int = 0
    """Tokens drafted after each step, for the next step to verify."""
    draft_in_cache: bool = False
    """Whether the drafter keeps its own KV (EAGLE, a draft model; n-grams don't)."""
    acceptance_rate: float = 0.7
    """Probability that a drafted token is accepted after the drafted tokens before it. The
    simulator's option, not vLLM's."""
    seed: int = 0
    """Seed of the draws of acceptance."""
    host_block_count: int = 0
    """Blocks of the host cache (OffloadingConnector); 0: none."""
    offload_prompt_only: bool = True
    """Whether the host keeps blocks of prompts only, not of answers."""

    @property
    @override
    def priority_sign(self) -> int:
        return 1

    @property
    def lookahead_tokens(self) -> int:
        return self.num_speculative_tokens if self.draft_in_cache else 0

    @override
    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        if not self.enable_chunked_prefill and self.step_tokens_max < self.model_len:
            raise ValueError(
                f"without chunked prefill a step must take the longest prompt: step_tokens_max "
                f"{self.step_tokens_max} is less than {self.model_len}"
            )
        if not 0 <= self.watermark < 1 or not 0 <= self.acceptance_rate <= 1:
            raise ValueError("watermark and acceptance_rate are shares: 0 to 1")
        if self.max_loras < 1 or min(self.num_speculative_tokens, self.host_block_count) < 0:
            raise ValueError("max_loras must be at least 1, counts of tokens and blocks at least 0")


@dataclass(slots=True, eq=False)
class VllmSequence(Sequence):
    """A request inside vLLM. Law: 0 <= computed_tokens < known_tokens + draft_tokens between
    steps."""

    number: int = 0
    """Serial number by arrival."""
    draft_tokens: int = 0
    """Drafted tokens that the next step verifies."""
    ready_s: float | None = None
    """Time at which the KV that is being loaded into the request's blocks will be here, in seconds;
    None: no KV is being loaded."""
    pinned: list[int] = field(default_factory=list)
    """Hashes that the host must keep during the load."""
    remote_fetched: bool = False
    """Whether KV was fetched from another engine: that happens once; after a preemption the KV is
    computed here."""
    offered_count: int = 0
    """Leading blocks that the host cache has kept, or had before."""
    seen_blocks: set[int] = field(default_factory=set)
    """Places of the blocks that were offered to the host or loaded from it."""

    @property
    def rank(self) -> tuple[int, float, int]:
        """Sort key in a queue by priority (no data-parallel rank): priority, arrival, serial
        number; lowest first."""
        return self.submission.priority or 0, self.arrival_s, self.number
