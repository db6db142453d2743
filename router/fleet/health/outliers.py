"""Outlier detection: a worker at which requests fail gets no requests for a while.

    in use ──failures, refused connections, first tokens that never come──> ejected
    ejected ──ejection_s, doubled each time──> probing ──probes served──> in use
                                                  └──a probe fails──> ejected

The evidence is what callers report of their requests. Failures that one caller alone reports are
compared with what other callers and the worker's relay see: while these see the worker serve, it is
not ejected. A caller is known by its address: callers behind one proxy count as one, and a caller
with several addresses as several.

Pure: no clock, no I/O.

Laws:
- a request that failed by its client's fault, or was cancelled, counts neither for nor against a
  worker;
- error answers alone never eject more than `pool_percent` of the workers of one model and role;
- no worker stays ejected for longer than `ejection_max_s` without being probed, unless its engine
  refused connections and has not answered its relay since;
- while a worker is probed, at most `probes` requests that were sent since then are in flight there;
- an ejection by the reports of one caller alone ends when another caller's request is served there;
- an ejection by refused connections of two callers is not ended by successes of requests that were
  picked before: they say nothing of a port that was closed later.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from typing_extensions import override

from events.feed.replicas import EJECTED_MAX, Verdict
from indexer.identity import WorkerKey

CALLERS_MAX = 16
"""Callers remembered for each worker, those that reported last."""
OUTCOMES_MAX = 64
"""Latest outcomes remembered for each caller and worker, so that a busy caller does not outweigh
all others."""
NEWS_MAX = 100
RELAY = "its relay"
"""Name of a worker's relay among its callers; it can only report that the worker serves."""


class Fault(StrEnum):
    """How a request failed by its worker's fault."""

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
    """Constants that say when a worker is ejected, and for how long; only tests change them.

    docs/operate.md#workers-at-which-requests-fail says how they work together.
    """

    failures: int = 5
    """Failures in a row that eject a worker, as Envoy's default: of a worker that fails one request
    in ten, five in a row are one case in 100,000."""
    failure_percent: int = 30
    """Percentage of the worker's last requests that must have failed to eject it."""
    requests_min: int = 10
    """Fewest requests within window_s for failure_percent to count. Engines get few requests a
    second, so that Envoy's minimum of 100 would never be reached."""
    window_s: float = 10.0
    """Seconds for which an outcome counts for failure_percent."""
    pool_percent: int = 50
    """Percentage of the workers of a model and role that error answers alone may eject: a fault of
    all workers must not empty the fleet."""
    ejection_s: float = 1.0
    """Seconds of a first ejection; each further one is twice as long."""
    ejection_max_s: float = 20.0
    """Seconds of an ejection, at most, so that a worker that is well is back within 30 s."""
    calm_s: float = 60.0
    """Seconds without a failure, after which the next ejection lasts ejection_s again."""
    probes: int = 3
    """Requests that a worker must serve after an ejection before it is in use."""
    alone_s: float = 1.0
    """Seconds from failures that one caller alone reports to the worker's ejection, in which other
    callers may report what they see."""
    refused_alone_s: float = 0.3
    """Seconds from a refused connection that one caller alone reports to the worker's ejection: an
    engine that is gone refuses all callers, so the second report comes soon."""
    grace_s: float = 0.1
    """Seconds after a failure within which a success does not undo it: reports of two callers come
    in any order."""
    sample_after_s: float = 0.5
    """Seconds by which an engine's answer to its relay must be later than a refused connection to
    count as later: clocks of two hosts differ."""
    hang_s: float = 1.0
    """Seconds by which a first token may be later than hang_factor times the predicted time."""
    hang_factor: float = 3.0
    hang_requests: int = 3
    """Fewest requests that wait for first tokens at a worker, for it to count as hanging."""


@dataclass(slots=True)
class _Voice:
    """A caller's observations of a worker."""

    heard_s: float = -inf
    served_s: float = -inf
    """When the caller last reported that the worker served a request."""
    distrusted_until_s: float = -inf
    """Time until which the caller's failures count less, since others saw the worker serve."""
    count: int = 0
    """Outcomes that the caller has reported; the last OUTCOMES_MAX of them are remembered."""
    times: "array[float]" = field(default_factory=lambda: array("d", bytes(8 * OUTCOMES_MAX)))
    """Times of the last outcomes: that of outcome n is at place n modulo OUTCOMES_MAX. Each served
    request is written here, and an object for each would cost more than all else does."""
    failed: int = 0
    """A bit for each place of `times`: 1 if that request failed."""

    def note_failure(self, now_s: float) -> None:
        """Records a failed request; `Outliers.on_served` records a served one by itself."""
        place = self.count % OUTCOMES_MAX
        self.times[place] = now_s
        self.failed |= 1 << place
        self.count += 1

    def since(self, since_s: float) -> tuple[int, int]:
        """Numbers of failed and of all requests that were reported after since_s."""
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
    """Whether all failures in a row were timeouts or refused connections."""
    accusers: set[str] = field(default_factory=set)
    """Callers that reported the failures in a row; two at most are remembered."""
    refusers: set[str] = field(default_factory=set)
    """Callers whose connections were refused since `refused_s`; two at most are remembered."""
    refused_s: float = inf
    """When the first of `refusers` reported; no request picked later is known to be served."""
    accepted_s: float = -inf
    """Latest time at which a request was picked that the worker served."""
    served_s: float = -inf
    """When a caller last reported that the worker served a request."""
    failed_s: float = -inf
    accused: Cause | None = None
    """Cause of the ejection that one caller's reports bring about at `due_s`, unless others see the
    worker serve after `accused_s`; None: there is none."""
    accused_by: str = ""
    accused_s: float = 0.0
    due_s: float = 0.0
    cause: Cause | None = None
    """Why the worker is ejected; None: it is in use."""
    accuser: str = ""
    """The only caller or replica by whose reports the worker is ejected; empty: there is further
    evidence."""
    replica: str = ""
    """Name of the replica that ejected the worker, where the cause is REPLICA."""
    ejected_s: float = 0.0
    until_s: float = 0.0
    times: int = 0
    """Ejections without calm_s seconds between them."""
    needs_sample: bool = False
    """Whether the engine must answer its relay before the worker is probed."""
    probing: bool = False
    probes: dict[str, float] = field(default_factory=dict)
    """Open reservation that probes the worker -> time of its pick; inf: its request was served."""
    served: int = 0
    """Requests sent since the ejection that were served."""
    relay_s: float = -inf
    relay_seq: int = 0
    """Number of the worker's last facts message when its last heartbeat came, at relay_s."""


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
        """Ejections that were not carried out, by the reason, one of WITHHELD."""
        self.probes: Counter[str] = Counter()
        self.callers_forgotten = 0
        self.probing: dict[WorkerKey, Standing] = {}
        """Workers that are being probed: `on_pick` must be called for each of their picks."""
        self.changes = 0
        """Number of changes that are news for other replicas."""
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

        seq: number of the worker's last facts message. A worker that publishes facts while it has
        such requests does serve.
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
        is_cut = len(verdict_of) >= EJECTED_MAX  # then an absent worker may be ejected, too
        for worker, standing in list(self._ejected.items()):
            if standing.replica == replica and worker not in verdict_of and not is_cut:
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

        The driver calls this more often than `tick`, to eject a dead worker within half a second.
        """
        for worker, standing in list(self._accused.items()):
            if standing.accused is not None and now_s >= standing.due_s:
                self._eject(worker, standing, standing.accused, now_s, standing.accused_by)

    def tick(self, now_s: float) -> None:
        """Judges accused workers, and begins to probe workers whose ejection is over."""
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
        """Log lines about ejections and their ends since the last call, the latest NEWS_MAX."""
        news = list(self._news)
        self._news.clear()
        return news

    def forget(self, worker: WorkerKey) -> None:
        """Forgets all evidence about a worker, as when it left the fleet view."""
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
        """Whether a probed worker has as many probes in flight as it may: one more than it has
        served, and `probes` at most."""
        return len(standing.probes) > min(standing.served, self.bounds.probes - 1)

    def _refuse(self, standing: Standing, caller: str, now_s: float) -> None:
        """Records a caller's refused connection; once two callers had one, the ejection no longer
        rests on one caller alone."""
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
        """Ejects a worker at once if two callers accuse it, or if no other caller was served there
        within window_s; else after a wait in which others may report that they are served."""
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
        """Applies that a caller, or the relay, saw a worker serve after since_s: what another
        caller's reports alone brought about, an accusation or an ejection, ends."""
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
        """Ejects a worker that another replica has ejected, unless this router's callers disproved
        an ejection by that replica in the last window_s."""
        name = f"replica {replica}"
        if self._voice(standing, name, now_s).distrusted_until_s > now_s:
            self.withheld["disputed"] += 1
            return
        self._eject(worker, standing, Cause.REPLICA, now_s, name, until_s)
        if standing.cause is Cause.REPLICA:
            standing.replica = replica
            standing.needs_sample = cause == Cause.REFUSED

    def _fails_too_often(self, standing: Standing, now_s: float) -> bool:
        """Whether failure_percent of the last requests failed; if callers besides the one with most
        failures saw any served, failure_percent of theirs must have failed, too."""
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
        """Ejects a worker, unless too many of its group are ejected. until_s: end of the ejection;
        None: after twice the seconds of the last one."""
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
        word = f", as {accuser} alone reports" if accuser else ""
        self._news.append(
            f"worker {worker} gets no requests for {until_s - now_s:.1f} s:"
            f" {_REASONS[cause].removeprefix('ejected: ')}{word}"
        )
        self._on_change(worker)

    def _within_share(self, worker: WorkerKey) -> bool:
        """Whether pool_percent lets one more worker of this worker's group be ejected."""
        group = self._group(worker)
        ejected = sum(other in self._ejected for other in group if other != worker)
        return 100 * (ejected + 1) <= self.bounds.pool_percent * len(group)

    def _answers(self, worker: WorkerKey, standing: Standing) -> bool:
        """Whether an ejected worker may be probed: where it refused connections, its engine must
        have answered its relay since, if the relay takes samples."""
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
