"""The laws of a run, judged from its records. Pure.

- no process ended by itself: no router above all;
- no request goes to a dead worker later than 0.5 s after whatever picked it could know of one that
  was refused there (late.py), while a worker that is well could take it;
- every reservation ended, and after the quiet nothing is believed to run anywhere;
- after the quiet every router's index holds what the engines' caches hold, to the digest, and every
  worker gets requests again;
- the memory that a router has in use after the quiet is at most 10 % above that after the warm-up;
- its resident memory, the least of each half minute, fitted by a line, grows by less than 1 MiB a
  minute from the fourth minute on, and by less than 0.2 MiB from the eleventh minute on of a run of
  half an hour and longer, beyond twice the fit's error;
- with attempts, no request fails before its first byte while a worker that is well and a router
  could take it;
- what fails after its first byte was sent to a worker that was in trouble;
- the machine had its cores: on a run in which it had not, the laws about times say little.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.late import LINE, late_picks
from tests.chaos.records import Cause, Observed, RouterSeen, Served, Trouble
from tests.stage.slope import FLOOR_S, growth

LATE_S = 0.5
"""From the first failure at a dead worker until no request is sent there."""
GROWTH_MAX = 0.10
LONG_S = 1800.0
SLOPE_FROM_S = {False: 180.0, True: 600.0}
"""Until when routers may grow as they learn, by whether the run is a long one of LONG_S."""
SLOPE_MAX = {False: 1 << 20, True: (1 << 20) / 5}
"""Bytes a minute by which their resident memory may grow from then on."""
FLOORS = 4
"""Periods of FLOOR_S that a slope is made of, at least."""
GROWN = 8
"""Kinds of objects that are named where memory grew."""
WELL_S = 5.0
"""A worker counts as well when it has had no trouble for so long: beats have told the routers."""
ROUTER_WELL_S = 1.0
AWAY_S = 1.0
"""Without a core, in a request's time and WELL_S before it, from which on a failure is no one's:
half of a client's patience with an engine."""
AWAY_SHARE = 0.02
"""Of the run, without a core, from which on it says little."""

DEAD = frozenset({Cause.KILL, Cause.RESTART})
"""Nothing listens there: the first request that comes is refused."""
REFUSED = "refused"
"""Of an attempt's failure: what tells a dead worker from one that fails now and then."""
NOT_AS_SENT = ("InvalidRequest", "DuplicateRequest", "UnknownModel", "UnknownSession")
"""Of a request's failure: the router's word that the request itself is wrong."""
MUTE = frozenset({Cause.STOP, Cause.HANG})
"""Requests are taken, and never answered: nothing tells them from slow ones but a time limit."""
ENGINE = DEAD | MUTE | {Cause.ERRORS, Cause.HALF}
"""What an engine's clients feel."""
UNWELL = ENGINE | {
    Cause.PAGES,
    Cause.RELAY,
    Cause.WIRE_CUT,
    Cause.WIRE_SLOW,
    Cause.WIRE_CORRUPT,
    Cause.DRAIN,
}
"""A worker with one of these may not be eligible."""
AWAY = frozenset({Cause.ROUTER, Cause.ROLLING, Cause.ROUTER_STOP})
"""A router's own."""


@dataclass(frozen=True)
class Verdict:
    """One law: how often it was looked at, and how often it was broken."""

    law: str
    looked: int
    broken: int
    timed: bool = False
    """Whether it is about a time, which a busy machine doesn't keep."""
    details: tuple[str, ...] = field(default=())
    """The first few cases that broke it."""

    @property
    def holds(self) -> bool:
        return not self.broken


def judge(run: Observed) -> list[Verdict]:
    """Every law, in the order of the table."""
    well = Well(run.troubles, run.engines)
    return [
        _processes(run),
        _dead_picks(run, well),
        _first_bytes(run, well),
        _later_failures(run),
        _reservations(run),
        _loads(run),
        _index(run),
        _in_use(run),
        _memory(run),
        _slope(run),
        _machine(run),
    ]


def settled(run: Observed) -> bool:
    """Whether all that the quiet brings about is so."""
    return all(law(run).holds for law in (_reservations, _loads, _index, _in_use))


class Well:
    """Which workers had no trouble when."""

    def __init__(self, troubles: Iterable[Trouble], workers: Iterable[str]) -> None:
        self._of: dict[str, list[Trouble]] = {worker: [] for worker in workers}
        self._lines = [one for one in troubles if one.cause in LINE | AWAY]
        for one in troubles:
            if one.cause in UNWELL and one.worker in self._of:
                self._of[one.worker].append(one)

    def worker(self, from_s: float, to_s: float, *, but: str = "") -> bool:
        """Whether some worker was well all that time, and for WELL_S before."""
        return any(
            worker != but and not any(one.overlaps(from_s - WELL_S, to_s) for one in troubles)
            for worker, troubles in self._of.items()
        )

    def router(self, client: int, routers: int, from_s: float, to_s: float) -> bool:
        """Whether a client had a line to some router all that time."""
        bad = {
            one.router
            for one in self._lines
            if one.client in {client, None} and one.overlaps(from_s - ROUTER_WELL_S, to_s)
        }
        return len(bad) < routers


class Machine:
    """When a core was away."""

    def __init__(self, troubles: Iterable[Trouble]) -> None:
        self.away: list[tuple[float, float]] = []
        """In order, without overlaps."""
        for one in sorted(
            (one for one in troubles if one.cause is Cause.MACHINE), key=lambda one: one.from_s
        ):
            if self.away and one.from_s <= self.away[-1][1]:
                from_s, to_s = self.away.pop()
                self.away.append((from_s, max(to_s, one.to_s)))
            else:
                self.away.append((one.from_s, one.to_s))

    def away_s(self, from_s: float, to_s: float) -> float:
        """For how long, between two times."""
        return sum(max(0.0, min(to_s, end) - max(from_s, began)) for began, end in self.away)

    def serves(self, request: Served) -> bool:
        """Whether a failure of this request says something."""
        return self.away_s(request.began_s - WELL_S, request.ended_s) < AWAY_S


def failures_by_cause(run: Observed, *, begun: bool) -> Counter[str]:
    """What failed before or after its first byte, by the trouble that the last worker had."""
    found: Counter[str] = Counter()
    machine = Machine(run.troubles)
    for request in run.served:
        if request.failure and request.begun == begun:
            found[_blame(run.troubles, machine, request)] += 1
    return found


def _blame(troubles: Sequence[Trouble], machine: Machine, request: Served) -> str:
    """The trouble of the worker that the last attempt went to, else the machine's, else that of the
    client's lines."""
    if request.attempts:
        last = request.attempts[-1]
        for one in troubles:
            at_worker = one.cause in ENGINE and one.worker == last.worker
            if at_worker and one.overlaps(last.sent_s - 1.0, last.ended_s):
                return one.cause.value
    if not machine.serves(request):
        return Cause.MACHINE.value
    for one in troubles:
        if (one.client == request.client or one.cause in AWAY) and one.overlaps(
            request.began_s - 1.0, request.ended_s
        ):
            return one.cause.value
    return "none"


def _processes(run: Observed) -> Verdict:
    details = [f"{one.process} ended with code {one.code}" for one in run.ended]
    return _verdict("no process ended by itself", run.router_count, details)


def _dead_picks(run: Observed, well: Well) -> Verdict:
    dead = [one for one in run.troubles if one.cause in DEAD]
    details = [
        f"{trouble.worker} ({trouble.cause.value}) got a request of {one.replica or 'a fallback'}"
        f" {one.sent_s - known_s:.2f} s after it could be known: {one.failure or 'served'}"
        for trouble, known_s, one in late_picks(run, DEAD, LATE_S, REFUSED)
        if well.worker(known_s, one.sent_s, but=trouble.worker)
    ]
    return _verdict(
        f"no request to a dead worker {LATE_S:g} s after its picker could know of a refusal",
        len(dead),
        details,
        timed=True,
    )


def _first_bytes(run: Observed, well: Well) -> Verdict:
    machine = Machine(run.troubles)
    details = [
        f"client {one.client}, {one.ended_s - one.began_s:.2f} s: {one.failure}; tried "
        + (", ".join(f"{at.worker} {at.failure}" for at in one.attempts) or "nowhere")
        for one in run.served
        if one.failure
        and not one.begun
        and machine.serves(one)
        and not _altered(run.troubles, one)
        and well.worker(one.began_s, one.ended_s)
        and well.router(one.client, run.router_count, one.began_s, one.ended_s)
    ]
    asked = "with attempts, " if run.attempts else ""
    law = f"{asked}no failure before the first byte while a worker and a router are well"
    # Whether a worker was well, and had room, is judged by when; on a busy machine all are full.
    return _verdict(law, len(run.served), details, timed=True)


def _altered(troubles: Iterable[Trouble], request: Served) -> bool:
    """Whether a router refused a request as none that it can serve, over a line that alters bytes:
    it got another request than was sent, or had got another one by the same id."""
    return request.failure.startswith(NOT_AS_SENT) and any(
        one.cause is Cause.LINE_CORRUPT
        and one.client == request.client
        and one.overlaps(request.began_s - ROUTER_WELL_S, request.ended_s)
        for one in troubles
    )


def _later_failures(run: Observed) -> Verdict:
    machine = Machine(run.troubles)
    details = [
        f"client {one.client}: {one.failure} at {one.attempts[-1].worker}"
        for one in run.served
        if one.failure and one.begun and _blame(run.troubles, machine, one) == "none"
    ]
    begun = sum(any(at.begun for at in one.attempts) for one in run.served)
    # Which fault caused a failure is judged by when both were, so a busy machine blurs it.
    return _verdict("what fails after its first byte has a cause", begun, details, timed=True)


def _reservations(run: Observed) -> Verdict:
    details = [f"{one.name} has {one.reservations} open" for one in run.routers if one.reservations]
    return _verdict("every reservation ended", len(run.routers), details)


def _loads(run: Observed) -> Verdict:
    details = [
        f"{router.name}: {name} has {seen.load:g} requests in {seen.blocks:g} blocks"
        for router in run.routers
        for name, seen in router.workers.items()
        if seen.load or seen.blocks
    ]
    return _verdict("loads are zero after the quiet", _pairs(run), details)


def _index(run: Observed) -> Verdict:
    details = []
    for router in run.routers:
        for name, held in run.engines.items():
            seen = router.workers.get(name)
            if seen is None:
                details.append(f"{router.name} doesn't know {name}")
            elif seen.held != held:
                details.append(
                    f"{router.name}: {name} holds {held.blocks} blocks, the index"
                    f" {seen.held.blocks} (stream {seen.state},"
                    f" {'complete' if seen.complete else 'partial'})"
                )
    return _verdict("the index equals the engines' caches", _pairs(run), details)


def _in_use(run: Observed) -> Verdict:
    details = [
        f"{router.name}: {name} gets no requests: {seen.excluded}"
        for router in run.routers
        for name, seen in router.workers.items()
        if seen.excluded and name in run.engines
    ]
    return _verdict("every worker gets requests after the quiet", _pairs(run), details)


def _memory(run: Observed) -> Verdict:
    details = [
        f"{one.name}: {before} {kind} after the warm-up, {after} at the end{_grown(one, kind)}"
        for one in run.routers
        for kind, before, after in (
            ("bytes of malloc", one.warm.malloc, one.quiet.malloc),
            ("Python objects", one.warm.objects, one.quiet.objects),
        )
        if after > before * (1 + GROWTH_MAX)
    ]
    law = f"memory in use at the end at most {GROWTH_MAX:.0%} above that after the warm-up"
    return _verdict(law, len(run.routers), details, timed=True)


def slopes(run: Observed) -> dict[str, tuple[float, float]]:
    """Growth of each router's resident memory and its standard error, bytes a minute: a line
    through the least of each FLOOR_S."""
    from_s = SLOPE_FROM_S[_is_long(run)]
    floors: dict[str, dict[int, int]] = defaultdict(dict)
    for one in run.resident:
        if one.at_s >= from_s:
            piece = int(one.at_s // FLOOR_S)
            floors[one.name][piece] = min(one.bytes, floors[one.name].get(piece, one.bytes))
    return {name: growth(of) for name, of in sorted(floors.items()) if len(of) >= FLOORS}


def _slope(run: Observed) -> Verdict:
    fitted, is_long = slopes(run), _is_long(run)
    details = [
        f"{name}: {slope / 2**20:.2f} MiB a minute, with an error of {error / 2**20:.2f}"
        for name, (slope, error) in fitted.items()
        if slope - 2 * error >= SLOPE_MAX[is_long]
    ]
    law = (
        f"the least of resident memory grows by less than {SLOPE_MAX[is_long] / 2**20:g} MiB a"
        f" minute after {SLOPE_FROM_S[is_long] / 60:g} minutes"
    )
    return _verdict(law, len(fitted), details, timed=True)


def _is_long(run: Observed) -> bool:
    return run.to_s - run.from_s >= LONG_S


def _grown(router: RouterSeen, kind: str) -> str:
    """The kinds of objects that became more."""
    if kind == "bytes of malloc":
        return ""
    more = Counter(router.quiet.kinds)
    more.subtract(router.warm.kinds)
    return ": " + ", ".join(f"{count} more {name}" for name, count in more.most_common(GROWN))


def _machine(run: Observed) -> Verdict:
    away = Machine(run.troubles)
    seconds = run.to_s - run.from_s
    away_s = away.away_s(run.from_s, run.to_s)
    details = []
    if away_s > AWAY_SHARE * seconds:
        longest_s = max(to_s - from_s for from_s, to_s in away.away)
        details.append(
            f"a core was away for {away_s:.1f} s of {seconds:.0f} s, in {len(away.away)} pieces of"
            f" {longest_s:.1f} s at most"
        )
    law = f"no core was away for more than {AWAY_SHARE:.0%} of the time: else run it again"
    return _verdict(law, round(seconds), details, timed=True)


def _pairs(run: Observed) -> int:
    return len(run.routers) * len(run.engines)


_DETAILS_MAX = 12


def _verdict(law: str, looked: int, details: Sequence[str], *, timed: bool = False) -> Verdict:
    return Verdict(law, looked, len(details), timed, tuple(details[:_DETAILS_MAX]))
