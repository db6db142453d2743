"""The options of SGLang's scheduler, and its state of a request. Pure."""

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from simulator.engines.radix_cache import RadixNode
from simulator.engines.scheduler import SchedulerConfig, Sequence

Policy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]

LOWEST_PRIORITY = {True: 2**63 - 1, False: -(2**63)}
"""Whether low values go first -> priority of a request that names none, so that it goes last."""


@dataclass(frozen=True, slots=True)
class SglangConfig(SchedulerConfig):
    """Limits and choices of one engine. Defaults: those of SGLang 0.5.7.

    SGLang's names of the common limits: block_size is --page-size, max_num_seqs
    --max-running-requests, step_tokens_max --chunked-prefill-size (8192 on an 80 GB GPU).
    """

    policy: Policy = "fcfs"
    prefill_tokens_max: int = 16_384
    """Prompt tokens of a prefill batch; its first request may exceed it."""
    prefill_requests_max: int | None = None
    chunked_prefill: bool = True
    mixed_chunk: bool = False
    """Whether prefill batches also decode; only with chunked_prefill."""
    radix_cache: bool = True
    """Whether KV is kept after its request has ended."""
    conservativeness: float = 1.0
    """Factor of the memory that is set aside at first for the answers of running requests."""
    ignore_eos: bool = False
    """Whether answers have exactly max_tokens, as in benchmarks. The scheduler then sets aside the
    whole answer instead of a share."""
    priority_scheduling: bool = False
    low_priority_values_first: bool = False
    preemption_threshold: int = 10
    """A running request is preempted for a request whose priority is better by more than this."""
    loras_max: int = 8
    """Adapters in a batch; the base model counts as an adapter."""
    seed: int = 0
    """Seed of the policy "random"."""

    @override
    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is a new class, and super() would mean the old class.
        SchedulerConfig.__post_init__(self)
        if self.chunked_prefill and self.step_tokens_max % self.block_size:
            raise ValueError(
                f"step_tokens_max {self.step_tokens_max} is not a multiple of "
                f"block_size {self.block_size}"
            )
        if self.priority_scheduling and self.policy not in ("fcfs", "lof"):
            raise ValueError(f"priority_scheduling needs policy fcfs or lof, not {self.policy}")
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


@dataclass(slots=True, eq=False)
class SglangSequence(Sequence):
    """A request and its pages: held_pages = shared_pages + private_pages.

    Law: computed_tokens <= held_pages * page size while it is admitted.
    """

    priority: int = 0
    queued: int = 0
    """Serial number of the request's last arrival in the waiting queue."""
    node: RadixNode | None = None
    """The node in which its shared pages end, locked; None: it holds no pages."""
    shared_pages: int = 0
    """Leading pages, which are in the tree."""
    private_pages: int = 0
    """The pages after the shared pages."""
    extend_tokens: int = 0
    """Prompt tokens of the request that the present step computes."""

    @property
    def max_tokens(self) -> int:
        """The longest answer: all that the scheduler knows of its length."""
        return self.submission.longest_answer
