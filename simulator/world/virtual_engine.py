"""One engine in virtual time: a scheduler, and the end of its step. Pure.

    add -> begin_step -> end_step (StepResult) -> begin_step, without a gap

Law: while there is work, step follows step; an idle engine has no due time.
"""

from collections.abc import Callable

from typing_extensions import override

from simulator.engines.scheduler import Load, Scheduler, Sequence, StepResult, Submission

NOTHING = StepResult([], [])


class VirtualEngine:
    """A scheduler with its current step; the owner calls `end_step` at `due_s`."""

    def __init__(self, number: int, ranks: int, make: Callable[[], Scheduler]) -> None:
        self.number = number
        self.engine_id = f"worker-{number}"
        self.ranks = ranks
        self.up = True
        self.life = 0
        """Number of restarts."""
        self.due_s: float | None = None
        """End of the current step; None: there is none."""
        self.ready_s: float | None = None
        """Time at which an idle engine will have the KV cache that a request waits for; None: the
        engine is not idle, or no request waits for KV cache."""
        self._make = make
        self.scheduler = make()

    @override
    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<VirtualEngine {self.engine_id} {state}, {self.scheduler!r}>"

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Adds a request. Raises RequestRefused."""
        sequence = self.scheduler.add(submission, now_s)
        if self.due_s is None:
            self.begin_step(now_s)
        else:
            self._cut(now_s)
        return sequence

    def advance(self, now_s: float) -> StepResult:
        """The results of joined steps so far; if no step is going on, the events since the last
        step."""
        step = self.scheduler.step
        if step is not None and step.count == 1:
            return NOTHING
        return self.scheduler.advance(now_s)

    def end_step(self, now_s: float) -> StepResult:
        """Ends the current step; call `begin_step` next, at the same time."""
        self.due_s = None
        return self.scheduler.end_step(now_s)

    def begin_step(self, now_s: float) -> None:
        """Begins the next step, if there is work; else `ready_s` says when to call again."""
        step = self.scheduler.begin_step(now_s)
        self.due_s = None if step is None else step.end_s
        self.ready_s = self.scheduler.next_ready_s if step is None else None

    def load(self, rank: int = 0) -> Load:
        """The load of a rank."""
        return self.scheduler.load(rank)

    def die(self) -> None:
        """Loses everything: requests, cache, counters."""
        self.up = False
        self.due_s = self.ready_s = None

    def boot(self) -> None:
        """Starts again, empty."""
        self.up = True
        self.life += 1
        self.scheduler = self._make()

    def _cut(self, now_s: float) -> None:
        step = self.scheduler.cut_step(now_s)
        if step is not None:
            self.due_s = step.end_s
