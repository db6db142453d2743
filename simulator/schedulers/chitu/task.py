"""Chitu's options, a request as a task, and the batch of a round. Pure."""

from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig, Sequence

ORDINARY_PRIORITY = 1
"""Priority of a request that names none. Higher goes first."""


class TaskType(Enum):
    """What a task needs next. New and evicted tasks are prefills."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ChituConfig(SchedulerConfig):
    """Chitu's own options beside the common ones.

    max_num_seqs is Chitu's max_batch_size, the requests that hold cache, and step_tokens_max its
    prefill_chunk_size, the prompt tokens of one round. Chitu divides both among ranks; here both
    are a rank's share, like block_count.
    """

    scheduler_type: str = "request_preset,prefill_first"
    """Scores by name, the leading score first (simulator/schedulers/chitu/scores.py), and at most
    one of prefill_only and decode_only."""
    chunked_prefill: bool = True
    """False: prompts are computed whole, step_tokens_max has no effect."""
    prefill_num_tasks: int | None = None
    """Most prefills in one round. None: a scheduling group's share of max_num_seqs."""
    decode_num_tasks: int | None = None
    num_scheduler_groups: int = 1
    """Batches in flight at a time: the stages of the pipeline, or the slots of a dense cache."""
    dp_size: int = 1
    """Ranks of the data-parallel FIFO, each with a cache of its own."""
    prefix_caching: bool = True

    @property
    def prefill_limit(self) -> int:
        return self.prefill_num_tasks or self._group_share

    @property
    def decode_limit(self) -> int:
        return self.decode_num_tasks or self._group_share

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that a round may compute; without chunks, more than requests can have."""
        return self.step_tokens_max if self.chunked_prefill else self.model_len * self.max_num_seqs

    @override
    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is a new class, and super() would mean the old class.
        SchedulerConfig.__post_init__(self)
        limits = (self.prefill_num_tasks, self.decode_num_tasks)
        counts = (
            self.num_scheduler_groups,
            self.dp_size,
            *(limit for limit in limits if limit is not None),
        )
        if min(counts) < 1:
            raise ValueError(
                "prefill_num_tasks, decode_num_tasks, num_scheduler_groups and dp_size must be "
                "at least 1"
            )

    @property
    def _group_share(self) -> int:
        return -(-self.max_num_seqs // self.num_scheduler_groups)


@dataclass(slots=True, eq=False)
class Task:
    """A request in the task pool.

    It holds blocks from its first prefill on; a prefill with blocks is partly computed.
    """

    sequence: Sequence
    order: int
    """Place of the task in the pool, which decides between equal scores; kept through evictions."""
    priority: int
    type: TaskType = TaskType.PREFILL
    in_flight: bool = False
    """Whether the task's batch is in the pipeline, or its KV is being transferred: Chitu's
    "waiting"."""
    fetched: bool = False
    """Whether KV from another engine was requested: that happens once."""
    owner: int | None = None
    """The rank that holds its cache, in the data-parallel FIFO."""
    slot: int | None = None
    """Its slot of a dense cache, in the skew scheduler."""

    @property
    def holds_blocks(self) -> bool:
        return bool(self.sequence.blocks)


Work = tuple[Task, int]
"""(task, number of its tokens that the round computes)"""


@dataclass(slots=True)
class Batch:
    """The tasks of a round, all of the same type, in the pipeline."""

    group: int
    type: TaskType
    work: list[Work]
    may_join: bool = False
    """Whether the next round would be the same: decodes, while no request comes or goes."""
    stage_s: float = 0.0
    """Time that each stage of the pipeline takes."""
    stages_left: int = 1
