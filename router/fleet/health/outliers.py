"""Outlier detection: workers at which requests fail get none for a while.

    in use ──failures, refused connections, first tokens that never come──> ejected
    ejected ──ejection_s, doubled each time──> probing ──probes served──> in use
                                                  └──a probe fails──> ejected

Evidence is what callers report of their requests. One caller's word alone is held against what
the others, and the worker's relay, see: as long as they see the worker serve, it ejects nobody. A
caller is a host, as far as an address tells: callers behind one proxy count as one, and a caller
with several addresses as several.

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

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from typing_extensions import override

from events.feed.replicas import Verdict
from indexer.identity import WorkerKey

CALLERS_MAX = 16
"""Remembered of each worker, those that reported last."""
OUTCOMES_MAX = 64
"""Requests remembered of each caller and worker, so that a busy caller still counts as one."""
NEWS_MAX = 100
RELAY = "its relay"
"""Takes part as a caller that only ever sees the worker serve."""


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
class _Voice:
    """A caller's observations of a worker."""

    heard_s: float = -inf
    served_s: float = -inf
    """When it last saw the worker serve."""
    distrusted_until_s: float = -inf
    """Others saw the worker serve when this one said that it doesn't."""
    count: int = 0
    """Outcomes that it has reported; the last OUTCOMES_MAX of them are remembered."""
    times: "array[float]" = field(default_factory=lambda: array("d", bytes(8 * OUTCOMES_MAX)))
    """When each was reported, at its number modulo OUTCOMES_MAX. Numbers in place, since each
    served request of each worker writes here: objects of their own cost more than the rest."""
    failed: int = 0
    """A bit for each of these places: the request failed."""

    def note_failure(self, now_s: float) -> None:
        """`Outliers.on_served` has the same for a request that was served."""
        place = self.count % OUTCOMES_MAX
        self.times[place] = now_s
        self.failed |= 1 << place
        self.count += 1

    def since(self, since_s: float) -> tuple[int, int]:
        """How many requests failed, and how many there were, after a time."""
        known = range(min(self.count, OUTCOMES_MAX))
        recent = [place for place in known if self.times[place] > since_s]
        return sum(self.failed >> place & 1 for place in recent), len(recent)


@dataclass(slots=True)
class Standing:
    """The evidence against a worker, and whether it is ejected."""

    voices: dict[str, _Voice] = field(default_factory=dict)
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
    """When anybody saw the worker serve."""
    failed_s: float = -inf
    accused: Cause | None = None
    """A caller's accusation waits for observations of others, from `accused_s` to `due_s`."""
    accused_by: str = ""
    accused_s: float = 0.0
    due_s: float = 0.0
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
    needs_sample: bool = False
    """The engine must have answered its relay before the worker is probed."""
    probing: bool = False
    probes: dict[str, float] = field(default_factory=dict)
    """Open reservations that probe it, and when they were made; inf: it has served them."""
    served: int = 0
    """Requests sent since the ejection that were."""
    relay_s: float = -inf
    relay_seq: int = 0
    """Sequence number of the last facts message by the last heartbeat, which came at relay_s."""


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
        self._accused: dict[WorkerKey, Standing] = {}
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
        voice = standing.voices.get(caller) or self._voice(standing, caller, now_s)
        place = voice.count % OUTCOMES_MAX
        voice.count += 1
        voice.times[place] = now_s
        if voice.failed:
            voice.failed &= ~(1 << place)
        voice.heard_s = voice.served_s = standing.served_s = now_s
        if opened_s > standing.accepted_s:
            standing.accepted_s = opened_s
        if opened_s >= standing.refused_s:
            standing.refusers.clear()
            standing.refused_s = inf
        if standing.failures:
            standing.failures, standing.only_hard = 0, True
        if standing.accused is not None or standing.cause is not None:
            self._seen_to_serve(worker, standing, caller, now_s, now_s)
        if standing.accusers:
            standing.accusers.clear()
        if standing.cause is not None and opened_s >= standing.ejected_s:
            self.probes["served"] += 1
            standing.served += 1
            if reservation_id in standing.probes:
                standing.probes[reservation_id] = inf
            if standing.served >= self.bounds.probes:
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
        voice = self._voice(standing, caller, now_s)
        voice.note_failure(now_s)
        self._calm_down(standing, now_s)
        standing.failed_s = now_s
        standing.failures += 1
        standing.only_hard &= fault is not Fault.ERROR
        if len(standing.accusers) < 2:
            standing.accusers.add(caller)
        if fault is Fault.REFUSED and opened_s > standing.accepted_s:
            self._refuse(standing, caller, now_s)
        if standing.cause is not None:
            if standing.probing and opened_s >= standing.ejected_s:
                self.probes["failed"] += 1
                cause = Cause.REFUSED if fault is Fault.REFUSED else Cause.PROBE_FAILED
                self._eject(worker, standing, cause, now_s)
        elif fault is Fault.REFUSED:
            self._accuse(worker, standing, Cause.REFUSED, caller, now_s)
        elif standing.failures >= self.bounds.failures:
            self._accuse(worker, standing, Cause.FAILURES_IN_A_ROW, caller, now_s)
        elif self._fails_too_often(standing, now_s):
            self._eject(worker, standing, Cause.FAILURE_SHARE, now_s)

    def on_relay(self, worker: WorkerKey, others: float, seq: int, now_s: float) -> None:
        """Records what a worker's heartbeat shows. others: requests at the worker that neither this
        router nor other replicas sent.

        seq: number of the worker's last facts message. A worker that computes blocks while it has
        requests of others does serve.
        """
        standing = self._standings.get(worker)
        if standing is None:
            return
        if others >= 1 and seq > standing.relay_seq and standing.relay_s > -inf:
            voice = self._voice(standing, RELAY, now_s)
            voice.served_s = now_s
            self._seen_to_serve(worker, standing, RELAY, standing.relay_s, now_s)
        standing.relay_s, standing.relay_seq = now_s, seq

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
            elif standing.cause is None:
                self._believe(worker, standing, replica, verdict.cause, until_s, now_s)

    def verdicts(self, now_s: float) -> list[Verdict]:
        """Ejections by this replica's own evidence, for the message to other replicas."""
        return [
            Verdict(worker, max(0.0, standing.until_s - now_s), standing.cause)
            for worker, standing in self._ejected.items()
            if standing.cause not in (None, Cause.REPLICA) and not standing.probing
        ]

    def judge(self, now_s: float) -> None:
        """Ejects workers that one caller accused, and that no other evidence cleared in time.

        The driver calls this more often than `tick`: a dead worker has half a second.
        """
        for worker, standing in list(self._accused.items()):
            if standing.accused is not None and now_s >= standing.due_s:
                self._eject(worker, standing, standing.accused, now_s, standing.accused_by)

    def tick(self, now_s: float) -> None:
        """Does what is due by time."""
        self.judge(now_s)
        for worker, standing in list(self._ejected.items()):
            if standing.probing or now_s < standing.until_s:
                continue
            if self._answers(worker, standing):
                standing.probing = True
                standing.served = 0
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
        self._accused.pop(worker, None)
        self.probing.pop(worker, None)
        if self._ejected.pop(worker, None) is not None:
            self.changes += 1
            self._on_change(worker)

    def _standing(self, worker: WorkerKey) -> Standing:
        standing = self._standings.get(worker)
        if standing is None:
            standing = self._standings[worker] = Standing()
        return standing

    def _voice(self, standing: Standing, caller: str, now_s: float) -> _Voice:
        voice = standing.voices.get(caller)
        if voice is None:
            if len(standing.voices) >= CALLERS_MAX:
                oldest = min(standing.voices, key=lambda caller: standing.voices[caller].heard_s)
                del standing.voices[oldest]
                self.callers_forgotten += 1
            voice = standing.voices[caller] = _Voice()
        voice.heard_s = now_s
        return voice

    def _calm_down(self, standing: Standing, now_s: float) -> None:
        if now_s - standing.failed_s >= self.bounds.calm_s:
            standing.times = 0

    def _busy(self, standing: Standing) -> bool:
        """Whether as many probes are in flight as may be: one more than were served."""
        return len(standing.probes) > min(standing.served, self.bounds.probes - 1)

    def _refuse(self, standing: Standing, caller: str, now_s: float) -> None:
        """Notes a refused connection; the second caller's makes it more than one's word."""
        if now_s - standing.refused_s >= self.bounds.window_s:
            standing.refusers.clear()
        if not standing.refusers:
            standing.refused_s = now_s
        if len(standing.refusers) < 2:
            standing.refusers.add(caller)
        if len(standing.refusers) > 1 and standing.cause in (Cause.REFUSED, Cause.REPLICA):
            standing.accuser = ""

    def _accuse(
        self, worker: WorkerKey, standing: Standing, cause: Cause, caller: str, now_s: float
    ) -> None:
        """Ejects a worker: at once if a second caller says so, or if nobody was seen to be served
        that could say otherwise; else once others had time to."""
        bounds = self.bounds
        accused_by = {*standing.accusers, standing.accused_by} - {""}
        if cause is Cause.REFUSED:
            accused_by |= standing.refusers
        quiet_s = now_s - max(
            (voice.served_s for name, voice in standing.voices.items() if name != caller),
            default=-inf,
        )
        if len(accused_by) > 1:
            self._eject(worker, standing, cause, now_s)
        elif standing.voices[caller].distrusted_until_s > now_s and quiet_s < 2 * bounds.alone_s:
            self.withheld["disputed"] += 1
        elif quiet_s >= bounds.window_s or (standing.accused and now_s >= standing.due_s):
            self._eject(worker, standing, cause, now_s, caller)
        elif standing.accused is None:
            is_refusal = cause is Cause.REFUSED
            wait_s = bounds.refused_alone_s if is_refusal else bounds.alone_s
            standing.accused, standing.accused_by, standing.accused_s = cause, caller, now_s
            standing.due_s = now_s + wait_s
            self._accused[worker] = standing

    def _seen_to_serve(
        self, worker: WorkerKey, standing: Standing, caller: str, since_s: float, now_s: float
    ) -> None:
        """A worker has served since a time, as this caller sees: what another one alone holds
        against it is over."""
        grace_s = self.bounds.grace_s
        in_a_row = standing.accused is Cause.FAILURES_IN_A_ROW
        if standing.accused and (in_a_row or since_s >= standing.accused_s + grace_s):
            accuser = standing.accused_by
            self._acquit(worker, standing)
            if caller != accuser:
                self._distrust(standing, accuser, now_s)
        if standing.cause is None or since_s < standing.ejected_s + grace_s:
            return
        if standing.cause is Cause.NO_FIRST_TOKEN and caller != RELAY:
            self._take_back(worker, standing, "a first token came")
        elif standing.accuser and standing.accuser != caller:
            self._distrust(standing, standing.accuser, now_s)
            standing.times = max(0, standing.times - 1)
            self._take_back(worker, standing, f"{caller or 'another caller'} sees it serve")

    def _acquit(self, worker: WorkerKey, standing: Standing) -> None:
        standing.accused, standing.accused_by = None, ""
        self._accused.pop(worker, None)

    def _distrust(self, standing: Standing, caller: str, now_s: float) -> None:
        self.withheld["disputed"] += 1
        voice = self._voice(standing, caller, now_s)
        voice.distrusted_until_s = now_s + self.bounds.window_s

    def _believe(
        self,
        worker: WorkerKey,
        standing: Standing,
        replica: str,
        cause: str,
        until_s: float,
        now_s: float,
    ) -> None:
        """Another replica has ejected a worker: so do we, unless our callers knew better before."""
        name = f"replica {replica}"
        if self._voice(standing, name, now_s).distrusted_until_s > now_s:
            self.withheld["disputed"] += 1
            return
        self._eject(worker, standing, Cause.REPLICA, now_s, name, until_s)
        if standing.cause is Cause.REPLICA:
            standing.replica = replica
            standing.needs_sample = cause == Cause.REFUSED

    def _fails_too_often(self, standing: Standing, now_s: float) -> bool:
        """Whether too large a share of the last requests failed; and of those, too, that all but
        the caller with most failures report, if they saw any served."""
        bounds, since_s = self.bounds, now_s - self.bounds.window_s
        counts: dict[str, tuple[int, int]] = {}
        for name, voice in standing.voices.items():
            counts[name] = voice.since(since_s)
        failed = sum(failures for failures, _ in counts.values())
        total = sum(count for _, count in counts.values())
        if total < bounds.requests_min or 100 * failed < bounds.failure_percent * total:
            return False
        failed_most, total_most = max(counts.values())
        rest_failed, rest_total = failed - failed_most, total - total_most
        relay = standing.voices.get(RELAY)
        if rest_total > rest_failed:
            agreed = 100 * rest_failed >= bounds.failure_percent * rest_total
        elif not rest_failed and failed_most == total_most and relay is not None:
            agreed = relay.served_s <= since_s
        else:
            agreed = True
        if not agreed:
            self.withheld["disputed"] += 1
        return agreed

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
        self._acquit(worker, standing)
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
        standing.served = 0
        for voice in standing.voices.values():
            voice.count = voice.failed = 0
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
        standing.probing = standing.needs_sample = False
        standing.probes.clear()
        standing.failures, standing.only_hard = 0, True
        self.probing.pop(worker, None)
        self._ejected.pop(worker, None)
        self.changes += 1
        self._news.append(f"worker {worker} gets requests again: {why}")
        self._on_change(worker)
