"""Chitu's skew scheduler: a dense cache, whose slots are the scheduling groups. Pure.

A slot of Chitu has places for its share of max_num_seqs requests, and every place has room for a
whole sequence, so no task lacks blocks and none is evicted. The slot that was freed first comes
first. The scheduler fills it from the pool, best score first, with tasks of the type of the slot's
last task (in an empty slot: of the best task in the pool), and computes the slot's tasks of that
type. So no prefill joins a slot that decodes.

Law: a task stays in its slot until it ends, and a slot never has more tasks than places.

Source: the description of Chitu's scheduling (part 10 of its series), and thu-pacman/chitu
chitu/scheduler.py as of the release it describes (`SkewScheduler`), read 2026-11-21. Chitu's dense
cache reuses no prefixes, like `prefix_caching` off. Nor does it take KV from other engines: it
computes the tokens of that KV again.
"""

from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.task import Batch, Task, TaskType


class SkewScheduler(ChituScheduler):
    """The skew scheduler: the slots of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        count = self.options.num_scheduler_groups
        self.slots: list[list[Task]] = [[] for _ in range(count)]
        """Tasks of each slot in order of entry, so decodes stand before prefills."""
        self.slot_sizes = [len(range(slot, config.max_num_seqs, count)) for slot in range(count)]

    @override
    def select(self, now_s: float) -> Batch | None:
        rank, options = self.ranks[0], self.options
        for group in self.free_groups:
            slot = self.slots[group]
            self._fill(slot, group, now_s)
            if not slot or slot[-1].type not in self.order.allowed:
                continue
            if slot[-1].type is TaskType.DECODE:
                work = rank.decode(slot, len(slot))
                return Batch(group, TaskType.DECODE, work, may_join=len(work) == len(slot))
            work = rank.prefill(slot, len(slot), options.chunk_tokens, now_s)
            return Batch(group, TaskType.PREFILL, work)
        return None

    @override
    def forget(self, task: Task) -> None:
        super().forget(task)
        if task.slot is not None:
            self.slots[task.slot].remove(task)

    @override
    def _check_options(self) -> None:
        super()._check_options()
        config = self.options
        if config.model_len * config.max_num_seqs > config.block_count * config.block_size:
            raise ValueError(
                f"a dense cache has room for every place's longest sequence, but max_num_seqs "
                f"{config.max_num_seqs} times max_model_len {config.model_len} is more than "
                f"{config.block_count} blocks of {config.block_size} tokens"
            )
        if config.num_scheduler_groups > config.max_num_seqs:
            raise ValueError("num_scheduler_groups must be at most max_num_seqs")
        if self.order.decode_only:
            raise ValueError(
                "decode_only needs the paged cache, and this scheduler has a dense one"
            )

    def _fill(self, slot: list[Task], group: int, now_s: float) -> None:
        places = self.slot_sizes[group] - len(slot)
        if not places:
            return
        outside = self.order.sort((task for task in self.pool.values() if task.slot is None), now_s)
        wanted = (slot or outside)[-1 if slot else 0].type if slot or outside else None
        for task in [task for task in outside if task.type is wanted][:places]:
            task.slot = group
            slot.append(task)
