"""Chitu's data-parallel FIFO: several ranks in one engine, each with a cache of its own. Pure.

All ranks compute the same type of task in a round: prefills while any can be admitted, else
decodes. With its first prefill a request gets a *cache owner*, the next rank in turn with a free
place, and keeps it. Each rank has its own budget of prompt tokens.

Law: a rank never owns more than max_num_seqs tasks (max_num_tasks_per_dp).

Source: the description of Chitu's scheduling (part 10 of its series), and thu-pacman/chitu
chitu/scheduler.py as of the release it describes (`DPFifoScheduler`), read 2026-11-21. That class
doesn't check for free blocks; here each rank checks and evicts as every rank of the present code
does (rank.py), and an evicted task keeps its owner.
"""

from itertools import islice

from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig, Submission
from simulator.schedulers.chitu.rank import Rank
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.task import Batch, Task, TaskType, Work


class DpFifoScheduler(ChituScheduler):
    """The data-parallel FIFO: the ranks of one engine, and the tasks that each rank owns."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._turn = 0
        """The rank that owns the next task."""
        self._owned = [0] * len(self.ranks)
        """Number of tasks that each rank owns."""

    @override
    def waiting_count(self, rank: Rank) -> int:
        """Waiting tasks of a rank. Tasks that any rank may own count in equal shares, as ranks will
        get them."""
        own = free = 0
        for task in self.pool.values():
            if not task.holds_blocks:
                wanted = task.sequence.submission.dp_rank if task.owner is None else task.owner
                own += wanted == rank.dp_rank
                free += wanted is None
        ranks = len(self.ranks)
        return own + free // ranks + (rank.dp_rank < free % ranks)

    @override
    def cached_tokens(self, submission: Submission) -> int:
        rank = self._next_rank() if submission.dp_rank is None else submission.dp_rank
        return self.ranks[rank or 0].cache.cached_tokens(submission)

    @override
    def select(self, now_s: float) -> Batch | None:
        options, group = self.options, self.free_groups[0]
        evictions = sum(rank.counts.preemptions for rank in self.ranks)
        for rank in self.ranks:
            rank.begin_round(now_s)
        prefills = self._prefills()
        for task in prefills:
            self._give_owner(task)
        work: list[Work] = []
        for rank, tasks in zip(self.ranks, self._by_owner(prefills), strict=True):
            rank.receive(tasks, now_s)
            own = rank.schedulable(tasks)
            work += rank.prefill(own, options.max_num_seqs, options.chunk_tokens, now_s)
        if work:
            return Batch(group, TaskType.PREFILL, work)
        ready = [task for task in self.pool.values() if task.holds_blocks and not task.in_flight]
        for rank, tasks in zip(self.ranks, self._by_owner(ready), strict=True):
            work += rank.decode(tasks, options.max_num_seqs)
        if not work:
            return None
        decode_count = sum(task.type is TaskType.DECODE for task in ready)
        evicted = sum(rank.counts.preemptions for rank in self.ranks) > evictions
        return Batch(group, TaskType.DECODE, work, len(work) == decode_count and not evicted)

    @override
    def forget(self, task: Task) -> None:
        super().forget(task)
        if task.owner is not None:
            self._owned[task.owner] -= 1

    @override
    def _check_options(self) -> None:
        """Any number of ranks is valid. The scheduler type has no effect: first in, first out."""

    def _prefills(self) -> list[Task]:
        """The earliest prefills that are not in flight, as many as all ranks have places."""
        ready = (
            task
            for task in self.pool.values()
            if task.type is TaskType.PREFILL and not task.in_flight
        )
        return list(islice(ready, self.options.max_num_seqs * len(self.ranks)))

    def _give_owner(self, task: Task) -> None:
        """Gives a task its owner, unless it has an owner or no rank that may own it has a place."""
        if task.owner is not None:
            return
        wanted = task.sequence.submission.dp_rank
        if wanted is None:
            wanted = self._next_rank()
            if wanted is None:
                return
            self._turn = (wanted + 1) % len(self.ranks)
        elif self._owned[wanted] == self.options.max_num_seqs:
            return
        task.owner = wanted
        self._owned[wanted] += 1

    def _next_rank(self) -> int | None:
        """The next rank in turn that has a place for a task; None: no rank has."""
        ranks = len(self.ranks)
        in_turn = ((self._turn + i) % ranks for i in range(ranks))
        most = self.options.max_num_seqs
        return next((rank for rank in in_turn if self._owned[rank] < most), None)

    def _by_owner(self, tasks: list[Task]) -> list[list[Task]]:
        """The tasks of each rank; tasks without an owner are left out."""
        by_owner: list[list[Task]] = [[] for _ in self.ranks]
        for task in tasks:
            if task.owner is not None:
                by_owner[task.owner].append(task)
        return by_owner
