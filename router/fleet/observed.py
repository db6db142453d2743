"""Estimates what this router would reach with requests that another router serves, beside what the
engines count today: tokens from caches, and the time to the first token (TTFT). Pure.

Engines count tokens from their caches and first tokens, but not for each request. So the TTFT of
this router's picks is estimated by a model of the engines, each of which computes its prompts one
after the other:

    seconds = work / rate        (router/fleet/rates.py defines work)

`rate` is the rate at which a round robin of the same requests, each with today's share of cached
tokens, has the mean TTFT that the engines count. At that rate, the same requests at the workers
that this router picked, with the tokens that those workers' caches lack, give the estimate. Prompts
that such a worker would still have to compute are load for the next pick, as if reserved.

The model is checked on what the engines count today: the mean TTFT of the next SLICE_FIRST_TOKENS
first tokens is predicted at the rate of all before them, and compared with the counted one.

Laws:
- a counter that fell is that of an engine that started again: its value counts from 0;
- sums are kept for every rate of RATES, so that no request is remembered to compute them again;
- memory: three arrays of RATES' length for each worker and one for each model, forgotten with the
  workers; the last PROMPTS_MAX prompts.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from indexer.identity import HashArray, WorkerKey
from router.fleet.rates import work

Numbers = npt.NDArray[np.float64]

RATES = np.geomspace(100.0, 10_000_000.0, 64)
"""Rates of an engine that are tried, tokens of work a second; each is 1.2 times the one before."""
_LOG_RATES = np.log(RATES)
SLICE_FIRST_TOKENS = 32
CHECKS_MIN = 3
"""Compared slices from which on their error is shown."""
PROMPTS_MAX = 128
"""Last observed prompts that are remembered, to which a newly stored block may belong."""
_COUNTERS = ("prefix_query_tokens", "prefix_hit_tokens", "first_tokens", "first_token_seconds")
"""Counters of a worker's engine (events/engines/numbers.py), in the order of `Today`."""
_SHARE = "cache_hit_rate"
"""Name of the share of cached tokens, for engines that do not count them."""


def _no_seconds() -> Numbers:
    return np.zeros(len(RATES))


@dataclass(slots=True)
class Today:
    """What engines counted since the first observed request of their model."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    first_tokens: float = 0.0
    first_token_s: float = 0.0
    shares: float = 0.0
    """Sum of the shares of cached tokens in heartbeats of engines that count no tokens."""
    share_count: int = 0
    """Number of the shares in that sum."""

    def cached_share(self) -> float | None:
        """Share of prompt tokens that came from caches; None: the engines don't say."""
        if self.prompt_tokens:
            return self.cached_tokens / self.prompt_tokens
        return self.shares / self.share_count if self.share_count else None

    def ttft_s(self) -> float | None:
        """Mean time to the first token at the engine; None: the engines don't say."""
        return self.first_token_s / self.first_tokens if self.first_tokens else None

    def add(self, grown: "Today") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(grown, name))


@dataclass(slots=True)
class ObservedWorker:
    """One worker: the requests that this router would have sent there, and its engine today."""

    model: str
    picks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of prompt_tokens that was usable in the worker's cache at the picks."""
    today: Today = field(default_factory=Today)
    timed: int = 0
    """Number of picks in `ttft_s`."""
    ttft_s: Numbers = field(default_factory=_no_seconds)
    """Sum of the picks' estimated seconds to the first token, at each of RATES."""
    free_s: Numbers = field(default_factory=_no_seconds)
    """Unix time at which the prompts of all picks would be computed, at each of RATES."""
    counters: Mapping[str, float] | None = None
    """The engine's counters in its last heartbeat; None: none came since the first pick."""


@dataclass(slots=True)
class ObservedModel:
    """One model's requests, as a round robin would have served them today."""

    today: Today = field(default_factory=Today)
    timed: int = 0
    ttft_s: Numbers = field(default_factory=_no_seconds)
    free_s: list[Numbers] = field(default_factory=list)
    """Unix time at which each worker of the round robin would have computed its prompts, at each of
    RATES."""
    slice_from: tuple[float, float, int, Numbers | None] = (0.0, 0.0, 0, None)
    """first_tokens, first_token_s, timed and ttft_s at the beginning of the slice; ttft_s is None
    in the first slice."""
    wrong_s: float = 0.0
    """Sum of the compared slices' errors, |predicted - counted| seconds of all first tokens."""
    checked_s: float = 0.0
    """Sum of the compared slices' counted seconds to first tokens."""
    checks: int = 0
    """Number of compared slices."""

    def log_rate(self) -> float | None:
        """Logarithm of the rate at which the round robin has the mean time to the first token that
        the engines count; None: they don't count it."""
        ttft_s = self.today.ttft_s()
        if not ttft_s or not self.timed:
            return None
        return float(np.interp(-np.log(ttft_s), -np.log(self.ttft_s / self.timed), _LOG_RATES))

    def error(self) -> float | None:
        """Mean error of the predicted times to the first token, as a share of the counted times;
        None: fewer than CHECKS_MIN slices were compared."""
        return self.wrong_s / self.checked_s if self.checks >= CHECKS_MIN else None


class Observed:
    """The requests that this router decides about while another router serves them."""

    def __init__(self) -> None:
        self.picks = 0
        self.at_s = -inf
        """When the last observed request was decided."""
        self.workers: dict[WorkerKey, ObservedWorker] = {}
        self._models: dict[str, ObservedModel] = {}
        self._prompts: deque[HashArray] = deque(maxlen=PROMPTS_MAX)

    def on_prompt(self, prefixes: HashArray) -> None:
        """Remembers the prefixes of an observed request."""
        self._prompts.append(prefixes)

    def shared_blocks(self, prefixes: HashArray) -> int:
        """Number of a prompt's leading blocks that an earlier observed prompt begins with, too."""
        return max((_common(prefixes, earlier) for earlier in self._prompts), default=0)

    def on_pick(
        self,
        key: WorkerKey,
        model: str,
        workers: int,
        prompt_tokens: int,
        cached_tokens: int,
        now_s: float,
    ) -> None:
        """Counts an observed request. key: the worker that would compute its prompt; workers: how
        many could. cached_tokens: usable at that worker. model: the first name of its model."""
        self.picks += 1
        self.at_s = now_s
        worker = self._worker(key, model)
        worker.picks += 1
        worker.prompt_tokens += prompt_tokens
        worker.cached_tokens += cached_tokens
        of_model = self._models.setdefault(model, ObservedModel())
        if (share := of_model.today.cached_share()) is None:
            return
        lines = of_model.free_s
        while len(lines) < workers:
            lines.append(_no_seconds())
        line = lines[of_model.timed % workers]
        of_model.timed += 1
        of_model.ttft_s += _served(line, now_s, prompt_tokens * (1.0 - share), prompt_tokens)
        worker.timed += 1
        new_tokens = prompt_tokens - cached_tokens
        worker.ttft_s += _served(worker.free_s, now_s, new_tokens, prompt_tokens)

    def on_heartbeat(self, key: WorkerKey, model: str, numbers: Mapping[str, float]) -> None:
        """Adds what a worker's engine has counted since its last heartbeat. numbers: its counters
        and shares by name."""
        of_model = self._models.get(model)
        if of_model is None:
            return
        worker = self._worker(key, model)
        before, worker.counters = worker.counters, numbers
        if before is None:
            return
        prompt, cached, first, first_s = (
            _grown(before.get(name), numbers.get(name)) for name in _COUNTERS
        )
        grown = Today(prompt, cached, first, first_s)
        if _SHARE in numbers and "prefix_query_tokens" not in numbers:
            grown.shares, grown.share_count = min(1.0, numbers[_SHARE]), 1
        worker.today.add(grown)
        of_model.today.add(grown)
        _check(of_model)

    def forget(self, workers: list[WorkerKey]) -> None:
        """Forgets workers that left the fleet, and models without a worker."""
        for key in workers:
            self.workers.pop(key, None)
        served = {worker.model for worker in self.workers.values()}
        self._models = {name: model for name, model in self._models.items() if name in served}

    def ahead(self, workers: Sequence[WorkerKey], now_s: float) -> Numbers:
        """Tokens that each worker would still have to compute, had it got this router's picks."""
        tokens = np.zeros(len(workers))
        rates: dict[str, int] = {}
        for row, key in enumerate(workers):
            worker = self.workers.get(key)
            if worker is None or not worker.timed:
                continue
            if (place := rates.get(worker.model)) is None:
                place = rates[worker.model] = self._place(worker.model)
            if place >= 0:
                tokens[row] = max(0.0, worker.free_s[place] - now_s) * RATES[place]
        return tokens

    def _place(self, model: str) -> int:
        """Index in RATES of the rate nearest to a model's; -1: the model's rate is not known."""
        known = self._models.get(model)
        log_rate = None if known is None else known.log_rate()
        return -1 if log_rate is None else int(np.abs(_LOG_RATES - log_rate).argmin())

    def ttft_s(self, worker: ObservedWorker) -> float | None:
        """Mean estimated seconds to the first token of a worker's picks; None: unknown."""
        model = self._models.get(worker.model)
        if not worker.timed or model is None or (log_rate := model.log_rate()) is None:
            return None
        return _at(log_rate, worker.ttft_s / worker.timed)

    def ttft_error(self, worker: ObservedWorker) -> float | None:
        """Mean error of such estimates for a worker's model; see ObservedModel.error."""
        model = self._models.get(worker.model)
        return None if model is None else model.error()

    def _worker(self, key: WorkerKey, model: str) -> ObservedWorker:
        worker = self.workers.get(key)
        if worker is None or worker.model != model:
            worker = self.workers[key] = ObservedWorker(model)
        return worker


def _common(prefixes: HashArray, earlier: HashArray) -> int:
    """Number of leading prefixes that two prompts share. A prefix is equal only where all before it
    are, so a binary search finds it."""
    least, most = 0, min(len(prefixes), len(earlier))
    while least < most:
        middle = (least + most + 1) // 2
        if prefixes[middle - 1] == earlier[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least


def _served(free_s: Numbers, now_s: float, new_tokens: float, prompt_tokens: int) -> Numbers:
    """Seconds to the first token of a prompt that comes now, at each of RATES; adds its work to
    free_s, the times at which the worker has computed all prompts before it."""
    np.maximum(free_s, now_s, out=free_s)
    free_s += work(new_tokens, prompt_tokens) / RATES
    return free_s - now_s


def _grown(before: float | None, now: float | None) -> float:
    if now is None or before is None:
        return 0.0
    return now - before if now >= before else now


def _at(log_rate: float, seconds: Numbers) -> float:
    """Seconds at a rate between two of RATES, interpolated from the seconds at each of RATES."""
    return float(np.exp(np.interp(log_rate, _LOG_RATES, np.log(seconds))))


def _check(model: ObservedModel) -> None:
    """Once a slice is full, compares its predicted with its counted seconds to first tokens, and
    begins the next slice."""
    today = model.today
    first_tokens, first_token_s, timed, ttft_s = model.slice_from
    count = today.first_tokens - first_tokens
    if count < SLICE_FIRST_TOKENS or model.timed == timed:
        return
    if ttft_s is not None:
        before = Today(first_tokens=first_tokens, first_token_s=first_token_s)
        log_rate = ObservedModel(before, timed, ttft_s).log_rate()
        if log_rate is not None:
            predicted_s = _at(log_rate, (model.ttft_s - ttft_s) / (model.timed - timed))
            counted_s = today.first_token_s - first_token_s
            model.wrong_s += abs(predicted_s * count - counted_s)
            model.checked_s += counted_s
            model.checks += 1
    model.slice_from = today.first_tokens, today.first_token_s, model.timed, model.ttft_s.copy()
