"""What Chitu schedules: its options, a request as a task, and the batch of one round. Pure."""

from dataclasses import dataclass, fields
from enum import Enum

from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig, Sequence

ORDINARY_PRIORITY = 1
"""Of a request that names none. Higher goes first."""


class TaskType(Enum):
    """What a task needs next. A new task is a prefill, and an evicted one is again."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ChituConfig(SchedulerConfig):
    """Chitu's own options beside the common ones.

    max_num_seqs is Chitu's max_batch_size, the requests that hold cache, and step_tokens_max its
    prefill_chunk_size, the prompt tokens of one round. Chitu divides both among ranks; here they
    are a rank's share, as block_count is.
    """

    scheduler_type: str = "request_preset,prefill_first"
    """Scores by name, the leading one first (simulator/schedulers/chitu/scores.py), and at most
    one of prefill_only and decode_only."""
    chunked_prefill: bool = True
    """False: prompts are computed whole, whatever step_tokens_max says."""
    prefill_num_tasks: int | None = None
    """Most prefills in one round. None: a scheduling group's share of the places."""
    decode_num_tasks: int | None = None
    num_scheduler_groups: int = 1
    """Batches in flight at a time: the stages of the pipeline, or the slots of a dense cache."""
    dp_size: int = 1
    """Ranks of the data-parallel FIFO, each with a cache of its own."""
    prefix_caching: bool = True

    @classmethod
    def of(cls, config: SchedulerConfig) -> "ChituConfig":
        """The config itself, or the common options with Chitu's defaults beside them."""
        if isinstance(config, ChituConfig):
            return config
        return cls(**{one.name: getattr(config, one.name) for one in fields(SchedulerConfig)})

    @property
    def prefill_limit(self) -> int:
        return self.prefill_num_tasks or self._group_share

    @property
    def decode_limit(self) -> int:
        return self.decode_num_tasks or self._group_share

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that one round may compute; without chunks, more than there can be."""
        return self.step_tokens_max if self.chunked_prefill else self.model_len * self.max_num_seqs

    @override
    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is made again, and super() would mean the old one.
        SchedulerConfig.__post_init__(self)
        limits = (self.prefill_num_tasks, self.decode_num_tasks)
        counts = (
            self.num_scheduler_groups,
            self.dp_size,
            *(one for one in limits if one is not None),
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

    It holds blocks from its first prefill on; a prefill that holds some is on its way.
    """

    sequence: Sequence
    order: int
    """Its place in the pool, which decides between equal scores; kept through evictions."""
    priority: int
    type: TaskType = TaskType.PREFILL
    in_flight: bool = False
    """In a batch that has not come out, or its KV is on its way: "waiting", in Chitu's words."""
    fetched: bool = False
    """Whether it has had KV from another engine: it asks once."""
    owner: int | None = None
    """The rank that holds its cache: the data-parallel FIFO's."""
    slot: int | None = None
    """Its place in a dense cache: the skew scheduler's."""

    @property
    def holds_blocks(self) -> bool:
        return bool(self.sequence.blocks)


Work = tuple[Task, int]
"""A task, and how many of its tokens the round computes."""


@dataclass(slots=True)
class Batch:
    """One round's tasks, all of one type, on their way through the pipeline."""

    group: int
    type: TaskType
    work: list[Work]
    may_join: bool = False
    """Whether the next round would be the same: decodes, while nobody comes or goes."""
    stage_s: float = 0.0
    """Time that each stage of the pipeline takes."""
    stages_left: int = 1
