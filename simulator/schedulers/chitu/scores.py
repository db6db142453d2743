"""Chitu's order of tasks: scores by name, combined. Pure.

A `scheduler_type` is a comma-separated list of names. A task's score is the tuple of the scores
with these names. The highest goes first; of equal tuples, the earlier request.

Source: thu-pacman/chitu chitu/scheduler.py and chitu/task.py, read 2026-11-21.
"""

from collections.abc import Callable, Iterable

from simulator.schedulers.chitu.task import Task, TaskType

Score = Callable[[Task, float], float]
"""(task, now_s) -> higher goes first."""

_DEADLINE_TOKEN_S = 0.001
_DEADLINE_OUTPUT_TOKENS = 1024
"""Chitu assumes an answer of this length for every request."""


def _arrival(task: Task, now_s: float) -> float:
    return -task.sequence.arrival_s


def _deadline(task: Task, now_s: float) -> float:
    tokens = task.sequence.prompt_tokens + _DEADLINE_OUTPUT_TOKENS
    return -(task.sequence.arrival_s + tokens * _DEADLINE_TOKEN_S)


SCORES: dict[str, Score] = {
    "fcfs": _arrival,
    "fifo": _arrival,
    "prefill_first": lambda task, now_s: float(task.type is TaskType.PREFILL),
    "request_preset": lambda task, now_s: task.priority,
    # Chitu's description resets a score when its task is scheduled; its code doesn't.
    "stride": lambda task, now_s: task.priority * (now_s - task.sequence.arrival_s),
    "deadline": _deadline,
    "prefix_align": lambda task, now_s: -task.sequence.known_tokens,
}

_MODES = {
    "prefill_only": ("prefill_first", TaskType.PREFILL),
    "decode_only": ("fcfs", TaskType.DECODE),
}
"""Mode -> its score, and the only type of task that it schedules."""


class Order:
    """The order of a scheduler type, and the types of task that it schedules."""

    def __init__(self, scheduler_type: str) -> None:
        """Raises ValueError for an unknown name."""
        names = [name.strip().lower() for name in scheduler_type.split(",") if name.strip()]
        unknown = [name for name in names if name not in SCORES and name not in _MODES]
        if unknown:
            raise ValueError(
                f"unknown scheduler type {unknown[0]!r}; there are {', '.join([*SCORES, *_MODES])}"
            )
        modes = {_MODES[name][1] for name in names if name in _MODES}
        self.allowed = frozenset(modes if len(modes) == 1 else TaskType)
        """Types of task that are scheduled: both without a mode, and with both modes."""
        self.decode_only = self.allowed == {TaskType.DECODE}
        self.steady = not {"stride", "prefix_align"} & set(names)
        """Whether the order of tasks stays while decodes go on."""
        scores = [_MODES[name][0] if name in _MODES else name for name in names] or ["fcfs"]
        self._scores = [SCORES[name] for name in scores]

    def sort(self, tasks: Iterable[Task], now_s: float) -> list[Task]:
        """Sorts tasks by their scores at time now_s, best first."""
        scores = self._scores
        return sorted(
            tasks, key=lambda task: (*(-score(task, now_s) for score in scores), task.order)
        )
