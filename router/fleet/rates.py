"""How fast each worker prefills, learned from reports, and how long its prompts will take. Pure.

Work is counted in tokens: the fixed cost of a request, and the cost of attention to earlier tokens,
are expressed in tokens, too, so that a single rate describes a worker:

    work    = REQUEST_TOKENS + new_tokens * (1 + attended / ATTENTION_TOKENS)
    seconds = work / rate

where attended = prompt_tokens - new_tokens / 2: what a new token attends to, on average.

An engine computes prompts in the order in which they come. So the seconds from a prompt's pick, or
from the prompt before if that was done later, to its first token make a sample (work, seconds). The
rate is the sum of work over the sum of seconds of all samples, of which old ones fade, and of
ANCHOR_WORK tokens at the anchor rate. The anchor rate is the median of the workers of the same
model that have MEASURED samples; before there are any, the rate of all samples of that model
with PRIOR_WORK tokens at the prior rate (PRIOR_RATE). A worker that was not measured has the anchor
rate, so that it gets neither fewer nor more requests for lack of a measurement.

Robust: the seconds of a sample count as LONGEST times the expected seconds at most, so a client
that reports late, or a stall, moves a rate by a few percent and not by a factor.

Laws:
- a rate is a positive, finite number; without samples it is the anchor rate;
- waiting time is never negative, and 0 where no prompt is under way;
- a slot's columns (a slot is a worker's index in the fleet's arrays) have what is known of the
  worker in it: a worker that gets another slot takes them with it;
- memory: one record for each prompt without its first token, and for each worker.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import numpy.typing as npt

from indexer.identity import WorkerKey
from router.fleet.table import Column

REQUEST_TOKENS = 500
"""Cost of a request beside its tokens: a part of a step, in which the weights are read."""
ATTENTION_TOKENS = 50_000
"""Context at which attention makes a token cost twice. By the arithmetic of transformers: about
6 * hidden size for small ones (30,000 for 8 billion parameters) to 10 * for large ones."""
MEAN_WORK = 5000.0
"""Work of a prompt in tokens, before any was measured."""
PRIOR_RATE = 20_000.0
"""Prompt tokens a second of a worker until its model's were measured: of the order of one large GPU
with a small model. Equal for all workers, it decides nothing between them."""
PRIOR_WORK = 20_000.0
"""Tokens of work at the prior rate that are added to a model's samples: a few prompts."""
ANCHOR_WORK = 300_000.0
"""Tokens of work at the anchor rate that are added to a worker's samples: some fifty prompts. Equal
workers must look equal, whatever prompts each got; a worker that is half as fast still shows."""
ALIKE = 1.25
"""Factor within which a measured rate counts as the anchor rate; other rates move nearer to it by
this factor. Equal engines differ by as much, by the prompts they got and the requests that decoded
meanwhile, and the seemingly faster ones would get all long prompts."""
FADE = 0.995
"""Weight of a sample after the next one: about the last two hundred samples decide."""
LONGEST = 4.0
MEASURED = 5
"""Samples from which on a worker's rate counts in the median."""
PROGRESS_MAX = 0.9
"""Largest share of the oldest open prompt that counts as computed before its first token."""


def work(new_tokens: Column | float, prompt_tokens: float) -> Column | float:
    """Work of a prompt of which new_tokens have to be computed, in tokens."""
    attended = prompt_tokens - new_tokens / 2
    return REQUEST_TOKENS + new_tokens * (1 + attended / ATTENTION_TOKENS)


@dataclass(slots=True)
class WorkerRate:
    """A worker's measured rate, and its prompts under way."""

    slot: int
    model: str
    rate: float
    samples: int = 0
    done_work: float = 0.0
    """Sum of the samples' work, tokens; old samples fade."""
    busy_s: float = 0.0
    """Sum of the samples' seconds; old samples fade."""
    done_at_s: float = 0.0
    """When a first token was last reported."""
    open: OrderedDict[str, tuple[float, int, float]] = field(default_factory=OrderedDict)
    """Prompts under way: reservation -> work, new tokens, when it was picked; in order of picks."""
    open_work: float = 0.0
    open_tokens: int = 0
    ends_s: float = 0.0
    """When all open work should be computed, by the rate."""

    def seconds(self, work_tokens: float) -> float:
        return work_tokens / self.rate


class PrefillRates:
    """The rates of all workers."""

    def __init__(self, prior_rate: float = PRIOR_RATE) -> None:
        """prior_rate: tokens a second of a worker as long as no worker of its model was
        measured.
        """
        self._prior_rate = prior_rate
        self._anchors: dict[str, float] = {}
        """Model -> anchor rate, tokens of work a second; models without a sample are absent."""
        self._workers: dict[WorkerKey, WorkerRate] = {}
        self._in_slot: dict[int, WorkerRate] = {}
        """Slot -> the worker that its columns are about. Another worker that comes into the slot
        takes this place, even before `on_moved` is called for the one that left."""
        self.under_way = 0
        """Number of open prompts at all workers; while it is 0, `on_end` need not be called."""
        self.mean_work = MEAN_WORK
        """Mean work of a prompt, over all workers, in tokens; old prompts fade."""
        self._columns = np.zeros((5, 0))
        """Columns by slot: rate (0: the anchor rate), ends_s, least wait in seconds, new tokens of
        open prompts, number of open prompts."""

    def __len__(self) -> int:
        return len(self._workers)

    def rate(self, key: WorkerKey, model: str) -> float:
        """Tokens of work a second that a worker of a model computes."""
        known = self._workers.get(key)
        return known.rate if known is not None else self.anchor(model)

    def anchor(self, model: str) -> float:
        """Tokens a second expected of a worker of a model before it is measured."""
        return self._anchors.get(model, self._prior_rate)

    def samples(self, key: WorkerKey) -> int:
        """Number of prompts that were measured at a worker."""
        known = self._workers.get(key)
        return known.samples if known is not None else 0

    def columns(
        self, slots: npt.NDArray[np.intp], models: Sequence[str], now_s: float
    ) -> "PrefillColumns":
        """Rates and waits of the workers in some slots. models: the model of each."""
        table = self.table(int(slots.max(initial=0)))
        rate, ends_s, least_s, tokens, count = table[:, slots]
        for row in np.flatnonzero(rate == 0).tolist():  # nothing was ever sent there
            rate[row] = self.anchor(models[row])
        return PrefillColumns(
            mean_work=self.mean_work,
            rate=rate,
            wait_s=np.maximum(ends_s - now_s, least_s).clip(0.0),
            tokens=tokens,
            count=count,
        )

    def table(self, last_slot: int) -> npt.NDArray[np.float64]:
        """Columns of all workers up to a slot at least, by slot: rate (0: the anchor rate), ends_s,
        least wait in seconds, new tokens of open prompts, number of open prompts. Read only.
        """
        if last_slot >= self._columns.shape[1]:
            self._make_room(last_slot)
        return self._columns

    def on_pick(
        self,
        key: WorkerKey,
        slot: int,
        model: str,
        reservation_id: str,
        new_tokens: int,
        prompt_tokens: int,
        now_s: float,
    ) -> None:
        """Records a prompt that was sent to a worker."""
        worker = self._worker(key, slot, model)
        todo = float(work(new_tokens, prompt_tokens))
        worker.open[reservation_id] = todo, new_tokens, now_s
        self.under_way += 1
        worker.open_work += todo
        worker.open_tokens += new_tokens
        worker.ends_s = max(now_s, worker.ends_s) + worker.seconds(todo)
        self._put(worker)

    def on_done(
        self,
        key: WorkerKey,
        slot: int,
        model: str,
        new_tokens: int,
        prompt_tokens: int,
        picked_at_s: float,
        now_s: float,
    ) -> None:
        """Measures a prompt, when its first token is reported."""
        worker = self._worker(key, slot, model)
        todo = float(work(new_tokens, prompt_tokens))
        took_s = max(0.0, now_s - max(worker.done_at_s, picked_at_s))
        took_s = min(took_s, LONGEST * worker.seconds(todo))
        worker.done_work = FADE * worker.done_work + todo
        worker.busy_s = FADE * worker.busy_s + took_s
        worker.samples += 1
        self.mean_work = FADE * self.mean_work + (1 - FADE) * todo
        worker.done_at_s = max(worker.done_at_s, now_s)
        self._settle(worker)
        worker.ends_s = now_s + worker.seconds(worker.open_work)
        self._put(worker)

    def on_end(self, key: WorkerKey, reservation_id: str) -> None:
        """Forgets a reservation's prompt, if it was still under way."""
        worker = self._workers.get(key)
        if worker is not None and reservation_id in worker.open:
            todo = worker.open[reservation_id][0]
            self._close(worker, reservation_id)
            worker.ends_s -= worker.seconds(todo)
            self._put(worker)

    def on_forgotten(self, workers: Collection[WorkerKey]) -> None:
        """Forgets workers that left the fleet view."""
        for key in workers:
            worker = self._workers.pop(key, None)
            if worker is not None:
                self.under_way -= len(worker.open)
                self._leave_slot(worker)

    def on_moved(self, key: WorkerKey, slot: int) -> None:
        """Moves a worker's columns to its new slot, as after a snapshot of its blocks."""
        worker = self._workers.get(key)
        if worker is not None and worker.slot != slot:
            self._leave_slot(worker)
            worker.slot = slot
            self._enter_slot(worker)
            self._put(worker)

    def tick(self) -> None:
        """Computes the anchor rates, and with them all workers' rates, again."""
        by_model: dict[str, list[WorkerRate]] = {}
        for worker in self._workers.values():
            if worker.busy_s > 0:
                by_model.setdefault(worker.model, []).append(worker)
        self._anchors = {model: self._anchor_of(of_model) for model, of_model in by_model.items()}
        for worker in self._workers.values():
            self._settle(worker)
            self._put(worker)

    def _worker(self, key: WorkerKey, slot: int, model: str) -> WorkerRate:
        worker = self._workers.get(key)
        if worker is not None and worker.model != model:
            self.on_forgotten([key])  # it came back with another model
            worker = None
        if worker is None:
            worker = self._workers[key] = WorkerRate(slot, model, self.anchor(model))
            self._enter_slot(worker)
        elif worker.slot != slot:
            self.on_moved(key, slot)
        return worker

    def _enter_slot(self, worker: WorkerRate) -> None:
        if worker.slot >= self._columns.shape[1]:
            self._make_room(worker.slot)
        self._in_slot[worker.slot] = worker

    def _leave_slot(self, worker: WorkerRate) -> None:
        if self._in_slot.get(worker.slot) is worker:
            del self._in_slot[worker.slot]
            self._columns[:, worker.slot] = 0.0

    def _settle(self, worker: WorkerRate) -> None:
        anchor = self.anchor(worker.model)
        known_s = ANCHOR_WORK / anchor + worker.busy_s
        ratio = (ANCHOR_WORK + worker.done_work) / known_s / anchor
        worker.rate = anchor * min(ratio * ALIKE, max(ratio / ALIKE, 1.0))

    def _anchor_of(self, workers: list[WorkerRate]) -> float:
        measured = [
            worker.done_work / worker.busy_s for worker in workers if worker.samples >= MEASURED
        ]
        if measured:
            return median(measured)
        busy_s = PRIOR_WORK / self._prior_rate + sum(worker.busy_s for worker in workers)
        return (PRIOR_WORK + sum(worker.done_work for worker in workers)) / busy_s

    def _close(self, worker: WorkerRate, reservation_id: str) -> None:
        closed = worker.open.pop(reservation_id, None)
        if closed is not None:
            self.under_way -= 1
            worker.open_work -= closed[0]
            worker.open_tokens -= closed[1]
        if not worker.open:
            worker.open_work = 0.0  # whatever the sums of floats have left

    def _put(self, worker: WorkerRate) -> None:
        if self._in_slot.get(worker.slot) is not worker:
            return
        least_s = 0.0
        if worker.open and worker.samples:  # callers report first tokens: no open prompt is done
            first, _, _ = next(iter(worker.open.values()))
            least_s = worker.seconds(worker.open_work - PROGRESS_MAX * first)
        columns, slot = self._columns, worker.slot
        # One by one: a fifth of the time that a tuple takes to become a column.
        columns[0, slot] = worker.rate
        columns[1, slot] = worker.ends_s
        columns[2, slot] = least_s
        columns[3, slot] = worker.open_tokens
        columns[4, slot] = len(worker.open)

    def _make_room(self, slot: int) -> None:
        there = self._columns.shape[1]
        self._columns = np.pad(self._columns, ((0, 0), (0, max(slot + 1, 2 * there) - there)))


@dataclass(frozen=True, slots=True)
class PrefillColumns:
    """Rates and waits of some workers, a row each."""

    mean_work: float
    """Mean work of a prompt, over all workers, in tokens."""
    rate: Column
    """Tokens of work a second."""
    wait_s: Column
    """Seconds until all open prompts that this router has sent are computed."""
    tokens: Column
    """New tokens of these open prompts."""
    count: Column
    """Number of these open prompts."""
