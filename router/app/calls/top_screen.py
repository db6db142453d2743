"""The screen of `kvroute top`: the state of a router. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvroute.v1 import ListQueueResponse, WatchedDecision, WorkerStatus
from router.app.calls.fleet import cut_off, reused_text, stream_text
from router.app.calls.gain import gain_text, gains, shares_text
from router.app.calls.tail import HEAD, line_of
from router.app.cli.text import add_row, line, styled, table

WIDE = 100
"""Characters of a terminal that shows all columns."""
BAR = 10
"""Characters of the bar that shows how busy a worker is."""
DECISIONS = 6
"""Lines of decisions, at most."""
FRAME = 7
"""Lines beside the workers and the decisions."""
TROUBLED, WARNED, SOUND, DRAINED = range(4)


@dataclass
class State:
    """What `kvroute top` knows of a router now."""

    target: str
    workers: Sequence[WorkerStatus] = ()
    queue: ListQueueResponse = field(default_factory=ListQueueResponse)
    decisions: deque[WatchedDecision] = field(default_factory=lambda: deque(maxlen=DECISIONS))
    ended_a_s: float | None = None
    """Requests that ended per second between the last two calls of `look`; None: there was one
    call."""
    trouble: str = ""
    """Why the numbers are old; empty: they are not."""
    unwatched: str = ""
    """Why there are no decisions; empty: they come."""
    _looked_s: float | None = None

    def look(self, workers: Sequence[WorkerStatus], queue: ListQueueResponse, now_s: float) -> None:
        """Takes the workers and the queue that were read. now_s: monotonic seconds."""
        if self._looked_s is not None and now_s > self._looked_s:
            before = {_key(worker): _ended(worker) for worker in self.workers}
            # A worker that came since has requests of unknown times.
            ended = sum(
                _ended(worker) - before.get(_key(worker), _ended(worker)) for worker in workers
            )
            self.ended_a_s = max(0, ended) / (now_s - self._looked_s)
        self._looked_s = now_s
        self.workers, self.queue = workers, queue


def _key(worker: WorkerStatus) -> tuple[str, int]:
    return worker.worker_id, worker.dp_rank


def _ended(worker: WorkerStatus) -> int:
    return sum(worker.outcomes.values())


def screen(state: State, height: int, width: int) -> RenderableType:
    """The screen, in `height` lines of `width` characters."""
    shown = [] if not state.decisions else list(state.decisions)[-DECISIONS:]
    gained = [styled(gain_text(gain), "bold") for gain in gains(state.workers)]
    lines = sum(-(-len(gain) // width) for gain in gained)
    room = max(1, height - FRAME - len(shown) - lines)
    workers = sorted(state.workers, key=_place)
    parts: list[RenderableType] = [_head(state), *gained, ""]
    parts.append(_workers(workers[:room], width, observed=bool(gained)))
    if (more := len(workers) - room) > 0:
        parts.append(styled(f"and {more} more, in less need of attention", "dim"))
    parts += ["", styled(HEAD, "bold"), *map(line_of, shown)]
    return Group(*parts)


def _head(state: State) -> RenderableType:
    workers = state.workers
    serve = sum(worker.schedulable for worker in workers)
    open_requests = sum(worker.reserved for worker in workers)
    pace = "" if state.ended_a_s is None else f"   {state.ended_a_s:.1f} requests/s"
    first = line(
        styled("kvroute top", "bold"),
        f"   {state.target}   ",
        styled(f"{serve} of {len(workers)} workers serve", "" if serve == len(workers) else "red"),
        f"   {open_requests} open   ",
        styled(f"{state.queue.waiting} waiting", "yellow" if state.queue.waiting else ""),
        pace,
    )
    trouble = "; ".join(filter(None, (state.trouble, cut_off(workers), state.unwatched)))
    last = styled(trouble, "red") if trouble else styled("q: quit", "dim")
    return Group(first, last)


def _workers(workers: Sequence[WorkerStatus], width: int, *, observed: bool) -> Table:
    """Table of the workers; a terminal narrower than WIDE lacks the columns that change least.
    observed: shows shares of prompt tokens from caches, not shares of predicted tokens that engines
    reused."""
    wide = width >= WIDE
    made = table("worker", "slots", right=("run", "wait", "ours", "in use"))
    if wide:
        for name in ("held", *(("today", "kvroute") if observed else ("reused",))):
            made.add_column(name, justify="right", no_wrap=True)
    for name in ("stream", *(("model",) if wide else ()), "what is wrong"):
        made.add_column(name, no_wrap=True)
    for worker in workers:
        slots = worker.total_slots or worker.slots_estimated
        busy = worker.running + worker.waiting + worker.reserved
        share = min(1.0, busy / slots) if slots else 0.0
        rank = f"/{worker.dp_rank}" if worker.dp_rank else ""
        used = f"{worker.active_blocks / worker.total_blocks:.0%}" if worker.total_blocks else "?"
        held = f"{worker.blocks_device + worker.blocks_host + worker.blocks_disk:,}"
        reused = shares_text(worker) if observed else (reused_text(worker.hit_ratio),)
        add_row(
            made,
            styled(worker.worker_id + rank, _STYLES[_place(worker)[0]]),
            _bar(share),
            str(worker.running),
            str(worker.waiting),
            str(worker.reserved),
            used,
            *((held, *reused) if wide else ()),
            stream_text(worker.stream_state, worker.stream_complete),
            *((worker.model or "?",) if wide else ()),
            styled(_wrong(worker), "red" if not worker.schedulable else "yellow"),
        )
    return made


_STYLES = {TROUBLED: "red", WARNED: "yellow", DRAINED: "dim", SOUND: ""}


def _place(worker: WorkerStatus) -> tuple[int, float, str, int]:
    """Sort key of a worker: those that need attention first, then the busiest."""
    if worker.drained:
        group = DRAINED
    elif not worker.schedulable:
        group = TROUBLED
    else:
        group = WARNED if worker.warnings else SOUND
    busy = worker.running + worker.waiting + worker.reserved
    return group, -busy, worker.worker_id, worker.dp_rank


def _wrong(worker: WorkerStatus) -> str:
    if worker.drained or not worker.schedulable:
        return worker.unschedulable_reason
    first = worker.warnings[0] if worker.warnings else ""
    more = f" (and {len(worker.warnings) - 1} more)" if len(worker.warnings) > 1 else ""
    return first[:80] + more


def _bar(share: float) -> Text:
    full = round(share * BAR)
    style = "red" if share >= 0.95 else "yellow" if share >= 0.75 else "green"
    return Text("█" * full, style) + Text("░" * (BAR - full), "dim")
