"""vLLM's settings, and what its scheduler knows of a request beside what every engine knows."""

from dataclasses import dataclass, field, fields
from typing import Literal

from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig, Sequence


@dataclass(frozen=True, slots=True)
class VllmConfig(SchedulerConfig):
    """Names and defaults are vLLM 0.32's, where it has the setting."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    """priority: the lowest value first, then the earliest."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """The most tokens of one prompt in one step while there is anybody else; 0: no such limit."""
    scheduler_reserve_full_isl: bool = True
    """Whether a request waits until its whole prompt fits, or only the first chunk of it."""
    watermark: float = 0.0
    """Share of the blocks that an admission leaves idle while others run."""
    max_loras: int = 1
    """Different LoRAs in one step."""
    num_speculative_tokens: int = 0
    """Drafted after each step, for the next one to verify."""
    draft_in_cache: bool = False
    """Whether the drafter keeps KV of its own (EAGLE, a draft model; n-grams don't)."""
    acceptance_rate: float = 0.7
    """Chance that a drafted token is accepted once those before it are. Ours, not vLLM's."""
    seed: int = 0
    """Of the draws of acceptance."""
    host_block_count: int = 0
    """Blocks of the host cache (OffloadingConnector); 0: none."""
    offload_prompt_only: bool = True
    """Whether the host keeps no blocks that an answer filled."""

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


def vllm_config(config: SchedulerConfig) -> VllmConfig:
    """A configuration that names no engine gets vLLM's defaults."""
    if isinstance(config, VllmConfig):
        return config
    return VllmConfig(**{one.name: getattr(config, one.name) for one in fields(SchedulerConfig)})


@dataclass(slots=True, eq=False)
class VllmSequence(Sequence):
    """0 <= computed_tokens < known_tokens + draft_tokens between steps."""

    number: int = 0
    """By arrival."""
    draft_tokens: int = 0
    """To be verified in the next step."""
    ready_s: float | None = None
    """What it waits for is there then; None: it waits for nothing but its turn."""
    loading: bool = False
    """Whether KV is on its way into its blocks."""
    pinned: list[int] = field(default_factory=list)
    """What the host must keep meanwhile, if it comes from there."""
    remote_asked: bool = False
    """KV from another engine is fetched once; after a preemption it is computed here."""
    offered_count: int = 0
    """Leading blocks that the host cache has kept, or had."""
    seen_blocks: set[int] = field(default_factory=set)
    """Places of the blocks that it offered to the host or loaded from there."""

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place in a queue by priority."""
        return self.submission.priority or 0, self.arrival_s, self.number
