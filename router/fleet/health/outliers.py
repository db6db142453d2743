"""Outlier detection: workers at which requests fail get none for a while.

    in use ──failures, refused connections, first tokens that never come──> ejected
    ejected ──ejection_s, doubled each time──> probing ──probes served──> in use
                                                  └──a probe fails──> ejected

Evidence is what callers report of their requests. Two callers eject a worker at once. The word of
one alone waits for what the others see: any request that is served meanwhile ends the suspicion,
and any that another caller was served later ends the ejection. Another replica's word is that of
one caller. A caller is a host, as far as an address tells: callers behind one proxy count as one,
and a caller with several addresses as several.

Pure: no clock, no I/O.

Laws:
- a request that its client gave up, or broke, counts neither for nor against a worker;
- error answers alone never eject more than `pool_percent` of the workers of one model and role;
- nobody is ejected for longer than `ejection_max_s` at a time without being probed, unless its
  engine refuses connections and its relay has not seen it answer since;
- while a worker is probed, at most `probes` requests are in flight there that were sent since;
- what one caller, and one only, holds against a worker doesn't outlast another's success there;
- what two callers hold against a worker that refuses their connections outlasts the successes of
  requests that were picked before: those say nothing of a port that is closed by now.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from typing_extensions import override

from events.feed.replicas import Verdict
from indexer.identity import WorkerKey

CALLERS_MAX = 16
"""Remembered of each worker, those that were served last."""
OUTCOMES_MAX = 64
"""Requests remembered of each worker, those that were reported last."""
NEWS_MAX = 100


class Fault(StrEnum):
    """What shows that a request failed by its worker's fault."""

    ERROR = "error"
    TIMEOUT = "timeout"
    REFUSED = "refused"


class Cause(StrEnum):
    """Why a worker was ejected; a metric's label and WorkerStatus have these values."""

    REFUSED = "refused"
    FAILURES_IN_A_ROW = "failures_in_a_row"
    FAILURE_SHARE = "failure_share"
    NO_FIRST_TOKEN = "no_first_token"
    PROBE_FAILED = "probe_failed"
    REPLICA = "replica"


WITHHELD = ("pool_percent", "disputed")
PROBES = ("served", "failed")
_REASONS = {
    Cause.REFUSED: "ejected: connections refused",
    Cause.FAILURES_IN_A_ROW: "ejected: failures in a row",
    Cause.FAILURE_SHARE: "ejected: too many failures",
    Cause.NO_FIRST_TOKEN: "ejected: no first token comes",
    Cause.PROBE_FAILED: "ejected: a probe failed",
    Cause.REPLICA: "ejected: by another replica",
}
BEING_PROBED = "ejected: being probed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierBounds:
    """When a worker is ejected, and for how long: constants that only tests change.

    docs/operate.md#workers-at-which-requests-fail says how they work together.
    """

    failures: int = 5
    """Failures in a row that eject a worker, as Envoy's default: of a worker that fails one request
    in ten, five in a row are one case in 100,000."""
    failure_percent: int = 30
    """Percentage of the worker's last requests that must have failed to eject it."""
    requests_min: int = 10
    """Requests from which on the percentage counts. Engines get few requests a second, so Envoy's
    volume of 100 would see nothing."""
    window_s: float = 10.0
    """Seconds for which an outcome counts for the percentage."""
    pool_percent: int = 50
    """Percentage of the workers of a model and role that error answers alone may eject: a fault of
    all workers must not empty the fleet."""
    ejection_s: float = 1.0
    """Seconds of a first ejection; each further one is twice as long."""
    ejection_max_s: float = 20.0
    """Seconds of an ejection, at most, so that a worker that is well is back within 30 s."""
    calm_s: float = 60.0
    """Seconds without a failure, after which ejections begin short again."""
    probes: int = 3
    """Requests that a worker must serve after an ejection before it is in use."""
    alone_s: float = 1.0
    """Seconds for which one caller's failures wait for those of other callers."""
    refused_alone_s: float = 0.3
    """Seconds for which one caller's refused connection waits for those of other callers: an engine
    that is gone refuses all callers, so the second report comes soon."""
    grace_s: float = 0.1
    """Seconds after a failure within which a success does not undo it: reports of two callers come
    in any order."""
    sample_after_s: float = 0.5
    """Seconds by which an engine's answer to its relay must be later than a refused connection to
    count as later: clocks of two hosts differ."""
    hang_s: float = 1.0
    """Seconds that a first token may come after hang_factor times the predicted time."""
    hang_factor: float = 3.0
    hang_requests: int = 3
    """Requests that owe first tokens, from which on a worker may hang."""


@dataclass(slots=True)
class Standing:
    """The evidence against a worker, and whether it is ejected."""

    served: dict[str, float] = field(default_factory=dict)
    """When each caller was last served there, as it reported."""
    recent: deque[tuple[float, str, bool]] = field(
        default_factory=lambda: deque(maxlen=OUTCOMES_MAX)
    )
    """The last reports: when, of which caller, and whether the request failed."""
    failures: int = 0
    """Failures in a row."""
    only_hard: bool = True
    """All of these were timeouts or refused connections."""
    accusers: set[str] = field(default_factory=set)
    """Callers that reported these; two at most are remembered."""
    refusers: set[str] = field(default_factory=set)
    """Callers whose connections were refused since `refused_s`; two at most are remembered."""
    refused_s: float = inf
    """When the first of them said so; no request that was picked later is known to be served."""
    accepted_s: float = -inf
    """When the last request was picked that was served."""
    served_s: float = -inf
    """When any caller was last served."""
    failed_s: float = -inf
    cause: Cause | None = None
    """Why it is ejected; None: it is in use."""
    accuser: str = ""
    """The caller or replica on whose word alone it is; empty: there is more against it."""
    replica: str = ""
    """Name of the replica that ejected the worker, where the cause is REPLICA."""
    ejected_s: float = 0.0
    until_s: float = 0.0
    times: int = 0
    """Ejections, without calm between them."""
    doubted_until_s: float = -inf
    """End of the time in which other replicas' word counts for nothing: callers here were served.
    """
    needs_sample: bool = False
    """The engine must have answered its relay before the worker is probed."""
    probing: bool = False
    probes: dict[str, float] = field(default_factory=dict)
    """Open reservations that probe it, and when they were made; inf: it has served them."""
    probes_served: int = 0
    """Requests sent since the ejection that were."""


class Outliers:
    """The evidence against every worker."""

    def __init__(
        self,
        enabled: bool = True,
        bounds: OutlierBounds | None = None,
        *,
        group: Callable[[WorkerKey], Collection[WorkerKey]],
        sampled_at_s: Callable[[WorkerKey], float | None],
        on_change: Callable[[WorkerKey], None],
    ) -> None:
        """group: returns the workers of a worker's model and role that beat and answer, ejected or
        not.

        sampled_at_s: returns when an engine last answered its relay; None: the relay takes no
        samples. on_change: called when a worker's `reason` has changed.
        """
        self.enabled = enabled
        self.bounds = bounds or OutlierBounds()
        self.ejections: Counter[Cause] = Counter()
        self.withheld: Counter[str] = Counter()
        """Ejections that did not come about, by what was against them."""
        self.probes: Counter[str] = Counter()
        self.callers_forgotten = 0
        self.probing: dict[WorkerKey, Standing] = {}
        """Workers that are being probed: each of their picks must go to `on_pick`."""
        self.changes = 0
        """Changes that other replicas should hear of."""
        self._standings: dict[WorkerKey, Standing] = {}
        self._ejected: dict[WorkerKey, Standing] = {}
        """Workers that are ejected or being probed."""
        self._suspects: dict[WorkerKey, float] = {}
        """Workers in use that one caller's word is against, and since when it waits."""
        self._news: deque[str] = deque(maxlen=NEWS_MAX)
        self._group = group
        self._sampled_at_s = sampled_at_s
        self._on_change = on_change

    @override
    def __repr__(self) -> str:
        ejected = ", ".join(f"{key} {standing.cause}" for key, standing in self._ejected.items())
        return f"<Outliers {ejected or 'none'}>"

    def reason(self, worker: WorkerKey) -> str:
        """Why a worker is ejected; empty when it isn't."""
        standing = self._ejected.get(worker)
        if standing is None or standing.cause is None:
            return ""
        if not standing.probing:
            return _REASONS[standing.cause]
        return BEING_PROBED if self._busy(standing) else ""

    def standing(self, worker: WorkerKey) -> Standing | None:
        """The evidence against a worker that is ejected or being probed; None for any other."""
        return self._ejected.get(worker)

    def served_s(self, worker: WorkerKey) -> float:
        """Time when a caller last reported that a worker served a request; -inf: never."""
        standing = self._standings.get(worker)
        return -inf if standing is None else standing.served_s

    def reconfigure(self, enabled: bool) -> None:
        """Switches outlier detection on or off; switched off, all workers are in use at once."""
        self.enabled = enabled
        if not enabled:
            for worker in list(self._standings):
                self.forget(worker)

    def on_served(
        self, worker: WorkerKey, reservation_id: str, caller: str, opened_s: float, now_s: float
    ) -> None:
        """Records that a request picked at opened_s has its first token, or its whole answer."""
        if not self.enabled:
            return
        standing = self._standings.get(worker) or self._standing(worker)
        served = standing.served
        if caller not in served and len(served) >= CALLERS_MAX:
            del served[min(served, key=served.__getitem__)]
            self.callers_forgotten += 1
        served[caller] = standing.served_s = now_s
        standing.recent.append((now_s, caller, False))
        if opened_s > standing.accepted_s:
            standing.accepted_s = opened_s
        if opened_s >= standing.refused_s:
            standing.refusers.clear()
            standing.refused_s = inf
        if standing.failures:
            standing.failures, standing.only_hard = 0, True
            standing.accusers.clear()
        if self._suspects and now_s >= self._suspects.get(worker, inf) + self.bounds.grace_s:
            del self._suspects[worker]
            self.withheld["disputed"] += 1
        if standing.cause is not None:
            self._disprove(worker, standing, caller, now_s)
        if standing.cause is not None and opened_s >= standing.ejected_s:
            self.probes["served"] += 1
            standing.probes_served += 1
            if reservation_id in standing.probes:
                standing.probes[reservation_id] = inf
            if standing.probes_served >= self.bounds.probes:
                self._take_back(worker, standing, "probes were served")
            else:
                self._on_change(worker)

    def on_failed(
        self, worker: WorkerKey, fault: Fault, caller: str, opened_s: float, now_s: float
    ) -> None:
        """Records that a request picked at opened_s failed by the worker's fault."""
        if not self.enabled:
            return
        standing = self._standing(worker)
        standing.recent.append((now_s, caller, True))
        self._calm_down(standing, now_s)
        standing.failed_s = now_s
        standing.failures += 1
        standing.only_hard &= fault is not Fault.ERROR
        if len(standing.accusers) < 2:
            standing.accusers.add(caller)
        is_refused = fault is Fault.REFUSED and opened_s >= standing.accepted_s
        if is_refused:
            self._refuse(standing, caller, now_s)
        if standing.cause is None:
            if is_refused or standing.failures >= self.bounds.failures:
                self._suspects.setdefault(worker, now_s)
            if not self._charge(worker, standing, now_s) and self._fails_too_often(standing, now_s):
                self._eject(worker, standing, Cause.FAILURE_SHARE, now_s)
        elif standing.probing and opened_s >= standing.ejected_s:
            self.probes["failed"] += 1
            cause = Cause.REFUSED if fault is Fault.REFUSED else Cause.PROBE_FAILED
            self._eject(worker, standing, cause, now_s)

    def on_overdue(self, worker: WorkerKey, now_s: float) -> None:
        """Records that a worker's first tokens are far later than expected."""
        if not self.enabled:
            return
        standing = self._standing(worker)
        if standing.cause is None or standing.probing:
            self._calm_down(standing, now_s)
            standing.failed_s = now_s
            self._eject(worker, standing, Cause.NO_FIRST_TOKEN, now_s)

    def on_pick(self, worker: WorkerKey, reservation_id: str, now_s: float) -> None:
        """Records that a request was sent to a worker that is being probed."""
        standing = self.probing[worker]
        standing.probes[reservation_id] = now_s
        if self._busy(standing):
            self._on_change(worker)

    def on_end(self, worker: WorkerKey, reservation_id: str) -> None:
        """Records that a reservation has ended, on any worker."""
        standing = self.probing.get(worker)
        if standing is None or reservation_id not in standing.probes:
            return
        was_busy = self._busy(standing)
        del standing.probes[reservation_id]
        if was_busy and not self._busy(standing):
            self._on_change(worker)

    def hear(self, replica: str, verdicts: Iterable[Verdict], now_s: float) -> None:
        """Records the workers that another replica has ejected by what its own callers reported."""
        if not self.enabled:
            return
        verdict_of = {verdict.worker: verdict for verdict in verdicts}
        for worker, standing in list(self._ejected.items()):
            if standing.replica == replica and worker not in verdict_of:
                standing.until_s = min(standing.until_s, now_s)
        for worker, verdict in verdict_of.items():
            until_s = now_s + min(verdict.left_s, self.bounds.ejection_max_s)
            if not self._group(worker):
                continue  # not known to answer here
            standing = self._standing(worker)
            if standing.cause is Cause.REPLICA and not standing.probing:
                standing.until_s = max(standing.until_s, until_s)
            elif standing.cause is not None:
                continue
            elif now_s < standing.doubted_until_s:
                self.withheld["disputed"] += 1
            else:
                self._eject(worker, standing, Cause.REPLICA, now_s, f"replica {replica}", until_s)
                if standing.cause is Cause.REPLICA:
                    standing.replica = replica
                    standing.needs_sample = verdict.cause == Cause.REFUSED

    def verdicts(self, now_s: float) -> list[Verdict]:
        """Ejections by this replica's own evidence, for the message to other replicas."""
        return [
            Verdict(worker, max(0.0, standing.until_s - now_s), standing.cause)
            for worker, standing in self._ejected.items()
            if standing.cause not in (None, Cause.REPLICA) and not standing.probing
        ]

    def judge(self, now_s: float) -> None:
        """Ejects workers that one caller's word is against, and where none was served meanwhile.

        The driver calls this more often than `tick`: a dead worker has half a second.
        """
        for worker in list(self._suspects):
            self._charge(worker, self._standings[worker], now_s)

    def tick(self, now_s: float) -> None:
        """Does what is due by time."""
        self.judge(now_s)
        for worker, standing in list(self._ejected.items()):
            if standing.probing or now_s < standing.until_s:
                continue
            if self._answers(worker, standing):
                standing.probing = True
                standing.probes_served = 0
                self.probing[worker] = standing
                self.changes += 1
                self._on_change(worker)

    def take_news(self) -> list[str]:
        """Sentences about the changes since the last call, at most NEWS_MAX."""
        news = list(self._news)
        self._news.clear()
        return news

    def forget(self, worker: WorkerKey) -> None:
        """Forgets a worker that left the fleet view."""
        self._standings.pop(worker, None)
        self._suspects.pop(worker, None)
        self.probing.pop(worker, None)
        if self._ejected.pop(worker, None) is not None:
            self.changes += 1
            self._on_change(worker)

    def _standing(self, worker: WorkerKey) -> Standing:
        standing = self._standings.get(worker)
        if standing is None:
            standing = self._standings[worker] = Standing()
        return standing

    def _calm_down(self, standing: Standing, now_s: float) -> None:
        if now_s - standing.failed_s >= self.bounds.calm_s:
            standing.times = 0

    def _busy(self, standing: Standing) -> bool:
        """Whether as many probes are in flight as may be: one more than were served."""
        return len(standing.probes) > min(standing.probes_served, self.bounds.probes - 1)

    def _refuse(self, standing: Standing, caller: str, now_s: float) -> None:
        """Notes a refused connection; the second caller's makes it more than one's word."""
        if not standing.refusers:
            standing.refused_s = now_s
        if len(standing.refusers) < 2:
            standing.refusers.add(caller)
        if len(standing.refusers) > 1 and standing.cause in (Cause.REFUSED, Cause.REPLICA):
            standing.accuser = ""

    def _charge(self, worker: WorkerKey, standing: Standing, now_s: float) -> bool:
        """Ejects a worker in use if there is enough against it: the word of two callers, or of one
        that waited, or where no other was served for window_s. Returns whether any is against it.
        """
        bounds = self.bounds
        charges = [(Cause.REFUSED, standing.refusers, bounds.refused_alone_s)]
        if standing.failures >= bounds.failures:
            charges.append((Cause.FAILURES_IN_A_ROW, standing.accusers, bounds.alone_s))
        for cause, callers, _ in charges:
            if len(callers) > 1:
                self._eject(worker, standing, cause, now_s)
                return True
        if (since_s := self._suspects.get(worker)) is None:
            return False
        for cause, callers, alone_s in charges:
            for caller in callers:
                quiet_s = now_s - _served_s(standing, but=caller)
                if quiet_s >= bounds.window_s or now_s - since_s >= alone_s:
                    self._eject(worker, standing, cause, now_s, caller)
                return True
        del self._suspects[worker]
        return False

    def _disprove(self, worker: WorkerKey, standing: Standing, caller: str, now_s: float) -> None:
        """An ejected worker serves, as a caller sees: what another one alone held against it is
        over."""
        if now_s < standing.ejected_s + self.bounds.grace_s:
            return
        if standing.cause is Cause.NO_FIRST_TOKEN:
            self._take_back(worker, standing, "a first token came")
        elif standing.accuser and standing.accuser != caller:
            self.withheld["disputed"] += 1
            standing.times = max(0, standing.times - 1)
            if standing.cause is Cause.REPLICA:
                standing.doubted_until_s = now_s + self.bounds.window_s
            self._take_back(worker, standing, f"{caller or 'another caller'} sees it serve")

    def _fails_too_often(self, standing: Standing, now_s: float) -> bool:
        """Whether too large a share of the last requests failed; and of those, too, that all but
        the caller with most failures report."""
        since_s = now_s - self.bounds.window_s
        recent = [(caller, failed) for at_s, caller, failed in standing.recent if at_s > since_s]
        failures = Counter(caller for caller, failed in recent if failed)
        if len(recent) < self.bounds.requests_min or not self._is_large(failures, len(recent)):
            return False
        worst = max(failures, key=failures.__getitem__)
        del failures[worst]
        others = sum(caller != worst for caller, _ in recent)
        if others:
            agreed = self._is_large(failures, others)
        else:
            agreed = _served_s(standing, but=worst) <= since_s
        if not agreed:
            self.withheld["disputed"] += 1
        return agreed

    def _is_large(self, failures: Counter[str], total: int) -> bool:
        return 100 * failures.total() >= self.bounds.failure_percent * total

    def _eject(
        self,
        worker: WorkerKey,
        standing: Standing,
        cause: Cause,
        now_s: float,
        accuser: str = "",
        until_s: float | None = None,
    ) -> None:
        """Ejects a worker, unless too many of its group are ejected. until_s: None: for twice as
        long as the last time."""
        bounds = self.bounds
        self._suspects.pop(worker, None)
        soft = cause in (Cause.FAILURE_SHARE, Cause.REPLICA) or (
            cause is Cause.FAILURES_IN_A_ROW and not standing.only_hard
        )
        if soft and not self._within_share(worker):
            self.withheld["pool_percent"] += 1
            return
        if until_s is None:
            standing.times += 1
            seconds = bounds.ejection_s * 2.0 ** min(standing.times - 1, 30)
            until_s = now_s + min(seconds, bounds.ejection_max_s)
        standing.cause, standing.accuser, standing.replica = cause, accuser, ""
        standing.ejected_s, standing.until_s = now_s, until_s
        standing.needs_sample = cause is Cause.REFUSED
        standing.probing = False
        standing.probes.clear()
        standing.probes_served = 0
        standing.recent.clear()
        self.probing.pop(worker, None)
        self._ejected[worker] = standing
        self.ejections[cause] += 1
        self.changes += 1
        word = f", on the word of {accuser}" if accuser else ""
        self._news.append(
            f"worker {worker} gets no requests for {until_s - now_s:.1f} s:"
            f" {_REASONS[cause].removeprefix('ejected: ')}{word}"
        )
        self._on_change(worker)

    def _within_share(self, worker: WorkerKey) -> bool:
        """Whether one more of a worker's group may be ejected."""
        group = self._group(worker)
        ejected = sum(other in self._ejected for other in group if other != worker)
        return 100 * (ejected + 1) <= self.bounds.pool_percent * len(group)

    def _answers(self, worker: WorkerKey, standing: Standing) -> bool:
        """Whether an ejected worker's engine may be there again, as far as its relay knows."""
        if not standing.needs_sample:
            return True
        sampled_at_s = self._sampled_at_s(worker)
        later_s = standing.ejected_s + self.bounds.sample_after_s
        return sampled_at_s is None or sampled_at_s >= later_s

    def _take_back(self, worker: WorkerKey, standing: Standing, why: str) -> None:
        standing.cause, standing.accuser, standing.replica = None, "", ""
        standing.accusers.clear()
        standing.refusers.clear()
        standing.refused_s = inf
        standing.probing = standing.needs_sample = False
        standing.probes.clear()
        standing.failures, standing.only_hard = 0, True
        self.probing.pop(worker, None)
        self._ejected.pop(worker, None)
        self.changes += 1
        self._news.append(f"worker {worker} gets requests again: {why}")
        self._on_change(worker)


def _served_s(standing: Standing, but: str) -> float:
    """When another caller than one was last served; -inf: none was."""
    served = (at_s for caller, at_s in standing.served.items() if caller != but)
    return max(served, default=-inf)
