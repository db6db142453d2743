"""The time between tokens at each worker, learned from reports, by the kind of worker. Pure.

An engine makes one token of each running answer in a step. A step takes longer the more requests
run and the more of the cache they read; and while a prompt is computed, no answer goes on. So for
an answer with `tokens` tokens after its first, the last of which came seconds_s after the first:

    seconds_s / tokens = base_s + request_s * requests + block_s * blocks + work_s * work / tokens

where requests and blocks are the worker's mean load over that time, and work is that of the prompts
which it computed meanwhile (router/fleet/rates.py). base_s, request_s, block_s and work_s, none
below 0, are learned for all workers that are configured alike, a kind: by the least squares of the
errors, each divided by the expected time, over reported answers, of which old ones fade. (Divided
by the measured time, quick answers would outweigh slow ones: for real vLLM on shared cores,
predictions were half of what was measured.) The prediction for a request that comes now:

    line      = base_s + request_s * (requests + 1) + block_s * (blocks + own)
    predicted = line / (1 - work_s * pace)

where own is the mean number of blocks of a prompt, and pace the work a second of one worker of the
kind lately, fading in PACE_S: it is not known which worker the next prompts go to.

The weight of an answer is its number of tokens, TOKENS_MAX at most. An answer is ignored without a
report of PREFILL_DONE, with fewer than TOKENS_MIN tokens, or if its tokens came faster than engines
make them, as if it was not streamed: in less than SHORTEST_S each, or a FACTOR-th of the expected
time. A client that reads slowly makes an answer long, so the measured time counts as
LATE_MAX times the expected one at most. For a pair, the wait for the decode worker's first token
counts, too.

Laws:
- a prediction is a positive, finite number, and never less with more load; there is none before
  MEASURED answers of the kind came;
- an answer is compared with a prediction that was made before it was reported;
- memory: one record for each known worker and each answer under way, and KINDS_MAX kinds.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, nan
from typing import NamedTuple

from events.plane.facts import Heartbeat
from indexer.identity import WorkerKey
from router.fleet.health.capacity import Kind
from router.fleet.reservations.load import WorkerLoad

TOKENS_MIN = 8
"""Fewest tokens after the first, of an answer that counts: a single step is no mean."""
TOKENS_MAX = 512
MEASURED = 20
"""Answers from which on a kind has predictions."""
FADE = 0.9995
"""Weight of an answer after the next one: about the last two thousand of a kind decide."""
PACE_S = 60.0
STRETCH_MAX = 4.0
"""Factor by which prompts that a worker computes lengthen its predicted time between tokens, at
most."""
FACTOR = 4.0
LATE_MAX = 2.0
"""Expected times that a measured time counts for, at most. Of 2, 2.5, 3 and 4 it had the least
error on real vLLM's answers, recorded on cores that others used. Where a fifth of the answers take
ten times as long, predictions are half of their mean."""
SHORTEST_S = 0.001
STEADY = 1e-3
"""Weight of the last solution beside the answers: numbers that the answers don't determine stay."""
SWEEPS = 20
KINDS_MAX = 64
NUMBERS = 4
_PAIRS = [(row, column) for row in range(NUMBERS) for column in range(row, NUMBERS)]


_Parts = tuple[float, float, float, float]
"""Factors of the four numbers for an answer: 1, requests, blocks, and work for each token."""


class TokenTime(NamedTuple):
    """Predicted seconds between tokens at the workers of a kind, as a line of their load."""

    base_s: float
    request_s: float
    block_s: float

    def at(self, requests: float, blocks: float) -> float:
        """Seconds between the tokens of a request that comes to a worker with this load."""
        return self.base_s + self.request_s * requests + self.block_s * blocks


UNKNOWN = TokenTime(nan, nan, nan)


@dataclass(slots=True, eq=False)
class _Kind:
    """What was learned of workers that are configured alike."""

    answers: int = 0
    squares: list[float] = field(default_factory=lambda: [0.0] * len(_PAIRS))
    """Weighted sums of the products of two parts of an answer, by _PAIRS; old answers fade."""
    products: list[float] = field(default_factory=lambda: [0.0] * NUMBERS)
    """Weighted sums of the products of each part and the measured time; old answers fade."""
    numbers: list[float] = field(default_factory=lambda: [0.0] * NUMBERS)
    """base_s, request_s, block_s and work_s."""
    own_blocks: float = 0.0
    """Mean blocks of a prompt; old answers fade."""
    work: float = 0.0
    """Work of all its workers, old work fading."""
    worker_s: float = 0.0
    """Sum of the seconds in which its workers did that work; old seconds fade."""
    predicted: TokenTime = UNKNOWN

    def expected_s(self, parts: _Parts) -> float:
        base_s, request_s, block_s, work_s = self.numbers
        _, requests, blocks, work = parts
        return base_s + request_s * requests + block_s * blocks + work_s * work

    def learn(self, parts: _Parts, took_s: float, tokens: int, blocks: int) -> bool:
        """Learns from an answer; returns whether it counts. took_s: measured seconds between its
        tokens. blocks: of its prompt."""
        is_solved = any(self.numbers)
        expected_s = max(self.expected_s(parts), SHORTEST_S) if is_solved else 0.0
        if took_s < max(SHORTEST_S, expected_s / FACTOR):
            return False
        scale_s = expected_s
        if is_solved:
            took_s = min(took_s, LATE_MAX * expected_s)
        elif self.answers:
            scale_s = self.products[0] / self.squares[0]  # a mean of those so far
        else:
            scale_s = took_s
        weight = min(tokens, TOKENS_MAX) / scale_s**2
        _, b, c, d = parts  # unrolled: a third of the time of loops, once for each answer
        wb, wc, wd = weight * b, weight * c, weight * d
        squares = (weight, wb, wc, wd, wb * b, wb * c, wb * d, wc * c, wc * d, wd * d)
        self.squares = [FADE * x + y for x, y in zip(self.squares, squares)]  # noqa: B905
        products = weight * took_s, wb * took_s, wc * took_s, wd * took_s
        self.products = [FADE * x + y for x, y in zip(self.products, products)]  # noqa: B905
        fade = FADE if self.answers else 0.0
        self.own_blocks = fade * self.own_blocks + (1 - fade) * blocks
        self.answers += 1
        return True

    def settle(self) -> None:
        """Computes the four numbers from all answers so far, by coordinate descent from the last
        numbers, and from them the prediction."""
        if self.answers < MEASURED:
            return
        numbers = self.numbers
        table = [[0.0] * NUMBERS for _ in range(NUMBERS)]
        for square, (row, column) in zip(self.squares, _PAIRS, strict=True):
            table[row][column] = table[column][row] = square
        last = [STEADY * table[i][i] * numbers[i] for i in range(NUMBERS)]
        for _ in range(SWEEPS):
            for i, squares in enumerate(table):
                if squares[i] > 0:
                    others = sum(squares[j] * numbers[j] for j in range(NUMBERS) if j != i)
                    best = (self.products[i] + last[i] - others) / (squares[i] * (1 + STEADY))
                    numbers[i] = max(0.0, best)
        base_s, request_s, block_s, work_s = numbers
        pace = self.work / self.worker_s if self.worker_s else 0.0
        stretch = 1 / max(1 / STRETCH_MAX, 1 - work_s * pace)
        base_s = max(base_s + request_s + block_s * self.own_blocks, SHORTEST_S)
        self.predicted = TokenTime(stretch * base_s, stretch * request_s, stretch * block_s)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker's present load, and sums of its load over time."""

    kind: _Kind
    heartbeat: Heartbeat
    at_s: float
    requests: float = 0.0
    blocks: float = 0.0
    requests_s: float = 0.0
    """Sum of requests * seconds until at_s; blocks_s likewise."""
    blocks_s: float = 0.0
    work: float = 0.0
    """Work of all prompts that the worker computed."""
    noted_work: float = 0.0
    """The part of `work` that was added to its kind's work."""

    def move_on(self, load: WorkerLoad, now_s: float) -> None:
        """Adds the load since the last call to the sums, and takes over the present load."""
        passed_s = max(0.0, now_s - self.at_s)
        self.requests_s += self.requests * passed_s
        self.blocks_s += self.blocks * passed_s
        self.at_s = max(self.at_s, now_s)
        self.requests, self.blocks = load.active_requests(), load.active_blocks()


class _Answer(NamedTuple):
    """An answer under way: its worker, and the sums of that _Worker at the answer's first token."""

    worker: _Worker
    began_s: float
    requests_s: float
    blocks_s: float
    work: float


class TokenTimes:
    """Learns and predicts the time between tokens of all workers."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, _Kind] = OrderedDict()
        self._workers: dict[WorkerKey, _Worker] = {}
        self._answers: dict[str, _Answer] = {}
        self._ticked_s: float | None = None
        self.measured_s = 0.0
        """Sum of the measured seconds of answers for which there were predictions."""
        self.off_s = 0.0
        """Sum of the differences between these seconds and those that the four numbers give for the
        load that each answer met."""

    def __len__(self) -> int:
        """Answers under way."""
        return len(self._answers)

    def of(self, key: WorkerKey, heartbeat: Heartbeat) -> TokenTime:
        """The prediction for a worker; UNKNOWN, whose numbers are NaN, as long as there is none."""
        worker = self._workers.get(key)
        if worker is not None and worker.heartbeat is heartbeat:
            return worker.kind.predicted
        known = self._kinds.get(Kind.of(heartbeat))
        return UNKNOWN if known is None else known.predicted

    def on_prompt(
        self, key: WorkerKey, heartbeat: Heartbeat, load: WorkerLoad, work: float, now_s: float
    ) -> None:
        """Records that a worker has computed a prompt. work: of the prompt, in tokens."""
        worker = self._worker(key, heartbeat, now_s)
        worker.move_on(load, now_s)
        worker.work += work

    def on_first(
        self,
        key: WorkerKey,
        heartbeat: Heartbeat,
        load: WorkerLoad,
        reservation_id: str,
        now_s: float,
    ) -> None:
        """Records the first token of an answer, after `on_prompt` was called for its prompt."""
        worker = self._worker(key, heartbeat, now_s)
        worker.move_on(load, now_s)
        self._answers[reservation_id] = _Answer(
            worker, now_s, worker.requests_s, worker.blocks_s, worker.work
        )

    def on_finished(
        self, reservation_id: str, load: WorkerLoad, output_tokens: int, blocks: int, now_s: float
    ) -> float | None:
        """Learns from a finished answer. load: its worker's, without this request. blocks: of its
        prompt. Returns the measured seconds between its tokens; None: the answer is ignored.
        """
        answer = self._answers.pop(reservation_id, None)
        if answer is None:
            return None
        worker, passed_s, tokens = answer.worker, now_s - answer.began_s, output_tokens - 1
        worker.move_on(load, now_s)
        if tokens < TOKENS_MIN or passed_s <= 0:
            return None
        parts = (
            1.0,
            (worker.requests_s - answer.requests_s) / passed_s,
            (worker.blocks_s - answer.blocks_s) / passed_s,
            (worker.work - answer.work) / tokens,
        )
        took_s = passed_s / tokens
        kind = worker.kind
        expected_s = kind.expected_s(parts)
        if not kind.learn(parts, took_s, tokens, blocks):
            return None
        if kind.predicted is not UNKNOWN:
            self.measured_s += passed_s
            self.off_s += tokens * abs(expected_s - took_s)
        return took_s

    def on_end(self, reservation_id: str) -> None:
        """Forgets an answer under way that ended without being finished."""
        self._answers.pop(reservation_id, None)

    def on_forgotten(self, workers: Iterable[WorkerKey]) -> None:
        """Forgets workers that left the fleet view. Their kinds stay, for when they come back."""
        for key in workers:
            self._workers.pop(key, None)

    def tick(self, load_of: Callable[[WorkerKey], WorkerLoad], now_s: float) -> None:
        """Computes all kinds' predictions again. load_of: returns a worker's present load."""
        passed_s = 0.0 if self._ticked_s is None else max(0.0, now_s - self._ticked_s)
        self._ticked_s = now_s
        fade = exp(-passed_s / PACE_S)
        for kind in self._kinds.values():
            kind.work *= fade
            kind.worker_s *= fade
        for key, worker in self._workers.items():
            worker.move_on(load_of(key), now_s)
            worker.kind.work += worker.work - worker.noted_work
            worker.kind.worker_s += passed_s
            worker.noted_work = worker.work
        for kind in self._kinds.values():
            kind.settle()

    def _worker(self, key: WorkerKey, heartbeat: Heartbeat, now_s: float) -> _Worker:
        worker = self._workers.get(key)
        if worker is not None and worker.heartbeat is heartbeat:
            return worker
        kind = self._kind(Kind.of(heartbeat))
        if worker is None or worker.kind is not kind:
            worker = self._workers[key] = _Worker(kind, heartbeat, now_s)
        worker.heartbeat = heartbeat
        return worker

    def _kind(self, name: Kind) -> _Kind:
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                _, old = self._kinds.popitem(last=False)
                self.on_forgotten([key for key, of in self._workers.items() if of.kind is old])
            kind = self._kinds[name] = _Kind()
        else:
            self._kinds.move_to_end(name)
        return kind
