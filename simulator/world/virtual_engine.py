"""One engine in virtual time: a scheduler, and when its step ends. Pure.

    add -> begin_step -> end_step (StepResult) -> the next one begins without a gap

Law: while there is work, step follows step; an engine with nothing to compute has no due time.
"""

from collections.abc import Callable

from typing_extensions import override

from simulator.engines.scheduler import Load, Scheduler, Sequence, StepResult, Submission

NOTHING = StepResult([], [])


class VirtualEngine:
    """Who computes what and until when; whoever owns it calls `end_step` at `due_s`."""

    def __init__(self, number: int, ranks: int, make: Callable[[], Scheduler]) -> None:
        self.number = number
        self.engine_id = f"worker-{number}"
        self.ranks = ranks
        self.up = True
        self.life = 0
        """Counts restarts."""
        self.due_s: float | None = None
        """When the step that is going on ends; None: there is none."""
        self.ready_s: float | None = None
        """When somebody who waits for something else than his turn is ready, if no step goes on."""
        self._make = make
        self.scheduler = make()

    @override
    def __repr__(self) -> str:
        told = "up" if self.up else "down"
        return f"<VirtualEngine {self.engine_id} {told}, {self.scheduler!r}>"

    def add(self, submission: Submission, now_s: float) -> Sequence:
        """Takes a request in. Raises RequestRefused."""
        sequence = self.scheduler.add(submission, now_s)
        if self.due_s is None:
            self.begin_step(now_s)
        else:
            self._cut(now_s)
        return sequence

    def advance(self, now_s: float) -> StepResult:
        """What has happened by now in steps that were joined."""
        step = self.scheduler.step
        if step is None or step.count == 1:
            return NOTHING
        return self.scheduler.advance(now_s)

    def end_step(self, now_s: float) -> StepResult:
        """What the step that ends now brings; call `begin_step` next, at the same time."""
        self.due_s = None
        return self.scheduler.end_step(now_s)

    def begin_step(self, now_s: float) -> None:
        """The next step, if there is anything to compute; else `ready_s` says when to ask again."""
        step = self.scheduler.begin_step(now_s)
        self.due_s = None if step is None else step.end_s
        self.ready_s = self.scheduler.next_ready_s if step is None else None

    def load(self, rank: int = 0) -> Load:
        """What one rank tells about itself."""
        return self.scheduler.load(rank)

    def die(self) -> None:
        """All is lost: requests, cache, counters."""
        self.up = False
        self.due_s = self.ready_s = None

    def boot(self) -> None:
        """Comes back empty."""
        self.up = True
        self.life += 1
        self.scheduler = self._make()

    def _cut(self, now_s: float) -> None:
        step = self.scheduler.cut_step(now_s)
        if step is not None:
            self.due_s = step.end_s
