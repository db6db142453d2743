"""What SGLang's scheduler is asked to do, and what it knows of a request. Pure."""

from dataclasses import dataclass, fields
from typing import Literal

from typing_extensions import override

from simulator.engines.radix_cache import RadixNode
from simulator.engines.scheduler import SchedulerConfig, Sequence

Policy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]

LOWEST_PRIORITY = {True: 2**63 - 1, False: -(2**63)}
"""Low values first? -> the priority of a request without one: it comes last either way."""


@dataclass(frozen=True, slots=True)
class SglangConfig(SchedulerConfig):
    """Limits and choices of one engine. Defaults: those of SGLang 0.5.7.

    The common limits under their names there: block_size is --page-size, max_num_seqs
    --max-running-requests, step_tokens_max --chunked-prefill-size (8192 on an 80 GB GPU).
    """

    policy: Policy = "fcfs"
    prefill_tokens_max: int = 16_384
    """Of one prefill batch; its first request may exceed it."""
    prefill_requests_max: int | None = None
    chunked_prefill: bool = True
    mixed_chunk: bool = False
    """Whether prefill batches also decode; only with chunked_prefill."""
    radix_cache: bool = True
    """Whether anything is kept when a request has ended."""
    conservativeness: float = 1.0
    """Above 1, more memory is set aside for running requests' answers."""
    ignore_eos: bool = False
    """Whether requests ask for answers of exactly max_tokens, as benchmarks do. The scheduler then
    sets aside the whole answer instead of a share."""
    priority_scheduling: bool = False
    low_priority_values_first: bool = False
    preemption_threshold: int = 10
    """A running request gives way to one whose priority is better by more than this."""
    loras_max: int = 8
    """Of one batch, the base model counted as one."""
    seed: int = 0
    """Of the policy "random"."""

    @override
    def __post_init__(self) -> None:
        # not super(): a slotted dataclass is a copy of the class that `super` means
        SchedulerConfig.__post_init__(self)
        if self.chunked_prefill and self.step_tokens_max % self.block_size:
            raise ValueError(
                f"step_tokens_max {self.step_tokens_max} is not a multiple of "
                f"block_size {self.block_size}"
            )
        if self.priority_scheduling and self.policy not in ("fcfs", "lof"):
            raise ValueError(f"no priority scheduling with policy {self.policy}: fcfs or lof")
        if self.mixes and self.step_tokens_max <= self.max_num_seqs:
            raise ValueError("mixed_chunk needs step_tokens_max above max_num_seqs")
        if min(self.prefill_tokens_max, self.prefill_requests_max or 1, self.loras_max) < 1:
            raise ValueError(
                "prefill_tokens_max, prefill_requests_max and loras_max must be at least 1"
            )
        if self.conservativeness < 0 or self.preemption_threshold < 0:
            raise ValueError("conservativeness and preemption_threshold must not be negative")

    @property
    def mixes(self) -> bool:
        """Whether prefill batches also decode."""
        return self.mixed_chunk and self.chunked_prefill

    @property
    @override
    def priority_sign(self) -> int:
        return 1 if self.low_priority_values_first else -1


def sglang_config(config: SchedulerConfig) -> SglangConfig:
    """The same limits, with SGLang's own choices as they are by default."""
    if isinstance(config, SglangConfig):
        return config
    return SglangConfig(**{one.name: getattr(config, one.name) for one in fields(config)})


@dataclass(slots=True, eq=False)
class SglangSequence(Sequence):
    """A request, and its pages: held_pages = shared_pages + private_pages.

    While it is admitted, computed_tokens <= held_pages * page size.
    """

    priority: int = 0
    queued: int = 0
    """Serial number of its last arrival in the waiting queue."""
    node: RadixNode | None = None
    """Where its shared pages end, locked; None: it holds nothing."""
    shared_pages: int = 0
    """Leading pages that are in the tree."""
    private_pages: int = 0
    """The pages after those."""
    extend_tokens: int = 0
    """That the step which is going on computes of it."""

    @property
    def max_tokens(self) -> int:
        """What the answer may come to: all that the scheduler knows of its length."""
        submission = self.submission
        limit = submission.max_tokens
        return submission.output_tokens if limit is None else limit
