"""The checker, under planted violations: each is reported by its law, and by no other."""

import random
from collections.abc import Callable

import msgspec
import pytest

from tests.chaos.late import AVOID_S, late_picks
from tests.chaos.laws import LATE_S, WELL_S, judge, slopes
from tests.chaos.records import (
    Attempt,
    Cause,
    Ended,
    Held,
    Memory,
    Observed,
    Resident,
    RouterSeen,
    Served,
    Trouble,
    WorkerSeen,
)
from tests.chaos.report import numbers, table

HELD = {"worker-0": Held(blocks=3, digest=7), "worker-1": Held(blocks=5, digest=9)}
KILLED = Trouble(cause=Cause.KILL, from_s=100.0, to_s=110.0, worker="worker-0")
REFUSED = Attempt(sent_s=100.1, ended_s=100.2, worker="worker-0", replica="a", failure="refused")
LATE = 100.2 + LATE_S + 0.1
WELL = 100.0 + 20.0
GOOD = Attempt(sent_s=100.2, ended_s=100.6, worker="worker-1", replica="a", begun=True)


def served(*attempts: Attempt, failure: str = "", begun: bool = False) -> Served:
    return Served(
        client=0,
        began_s=attempts[0].sent_s if attempts else 100.0,
        ended_s=attempts[-1].ended_s if attempts else 101.0,
        attempts=attempts,
        failure=failure,
        begun=begun,
    )


def seen(worker: str) -> WorkerSeen:
    return WorkerSeen(
        held=HELD[worker], state="live", complete=True, excluded="", load=0.0, blocks=0.0
    )


def router(name: str, replica: str) -> RouterSeen:
    return RouterSeen(
        name=name,
        replica=replica,
        workers={worker: seen(worker) for worker in HELD},
        reservations=0,
        warm=Memory(resident=100 << 20, malloc=100, objects=1000),
        quiet=Memory(resident=120 << 20, malloc=109, objects=1099),
    )


def a_good_run() -> Observed:
    """A worker is killed; one request finds that out, and is served by the other."""
    return Observed(
        served=(served(REFUSED, GOOD), served(GOOD)),
        troubles=(KILLED,),
        ended=(),
        engines=HELD,
        routers=(router("router-0", "a"), router("router-1", "b")),
        clients=1,
        router_count=2,
        from_s=90.0,
        to_s=200.0,
        resident=growing(0.9),
    )


def growing(mib_per_minute: float, seconds: int = 600) -> tuple[Resident, ...]:
    """A router's memory, which goes up and down besides."""
    return tuple(
        Resident("router-0", float(at_s), round((mib_per_minute * at_s / 60 + at_s % 3) * 2**20))
        for at_s in range(0, seconds, 5)
    )


def long(run: Observed, mib_per_minute: float) -> Observed:
    grown = growing(mib_per_minute, 3600)
    return msgspec.structs.replace(run, resident=grown, to_s=run.from_s + 3500.0)


def test_memory_that_wanders_is_no_growth() -> None:
    run = long(a_good_run(), 0.1)
    rng = random.Random(3)
    wanders = tuple(
        msgspec.structs.replace(one, bytes=one.bytes + rng.randrange(20 << 20))
        for one in run.resident
    )
    for resident in (run.resident, wanders):
        verdicts = judge(msgspec.structs.replace(run, resident=resident))
        assert not [one.law for one in verdicts if "resident" in one.law and not one.holds]
    ((slope, error),) = slopes(msgspec.structs.replace(run, resident=wanders)).values()
    assert abs(slope / 2**20 - 0.1) < 3 * error / 2**20


def plus(run: Observed, *more: Served | Trouble) -> Observed:
    """The run with further requests and troubles."""
    return msgspec.structs.replace(
        run,
        served=(*run.served, *(one for one in more if isinstance(one, Served))),
        troubles=(*run.troubles, *(one for one in more if isinstance(one, Trouble))),
    )


def late(sent_s: float = LATE, **of: object) -> Served:
    """A late request to the dead worker, then one to the other."""
    return served(at(REFUSED, sent_s, **of), at(GOOD, sent_s + 0.1, **of))


def trouble(cause: Cause, from_s: float, to_s: float, **about: object) -> Trouble:
    return Trouble(cause=cause, from_s=from_s, to_s=to_s, **about)


def with_worker(run: Observed, **fields: object) -> Observed:
    """The first router sees its first worker otherwise."""
    first, *others = run.routers
    workers = first.workers | {"worker-0": msgspec.structs.replace(seen("worker-0"), **fields)}
    changed = msgspec.structs.replace(first, workers=workers)
    return msgspec.structs.replace(run, routers=(changed, *others))


def with_router(run: Observed, **fields: object) -> Observed:
    changed = msgspec.structs.replace(run.routers[0], **fields)
    return msgspec.structs.replace(run, routers=(changed, run.routers[1]))


def at(attempt: Attempt, sent_s: float, **fields: object) -> Attempt:
    return msgspec.structs.replace(attempt, sent_s=sent_s, ended_s=sent_s + 0.1, **fields)


def no_core(from_s: float, to_s: float) -> Trouble:
    return trouble(Cause.MACHINE, from_s, to_s)


LOST = "RouterUnreachable"
WRONG = "InvalidRequest: INVALID_FIELD"


def broken(run: Observed) -> list[str]:
    return [one.law for one in judge(run) if not one.holds]


def test_a_good_run_breaks_no_law() -> None:
    assert broken(a_good_run()) == []
    assert all(one.looked for one in judge(a_good_run()))


PLANTED: dict[str, tuple[Callable[[Observed], Observed], str]] = {
    "a router that ended": (
        lambda run: msgspec.structs.replace(
            run, ended=(Ended(process="router-1", kind="router", code=1),)
        ),
        "no process ended",
    ),
    "a pick of a dead worker": (lambda run: plus(run, late()), "no request to a dead worker"),
    "a pick of a dead worker that the other router could know of": (
        lambda run: plus(run, late(replica="b")),
        "no request to a dead worker",
    ),
    "a fallback's pick of a worker that failed its client": (
        lambda run: plus(run, served(at(REFUSED, LATE, replica=""), at(GOOD, LATE + 0.1))),
        "no request to a dead worker",
    ),
    "a pick half a second after a router that was stopped went on": (
        lambda run: plus(run, late(105.6), trouble(Cause.ROUTER_STOP, 101.0, 105.0, router=0)),
        "no request to a dead worker",
    ),
    "a reservation left open": (
        lambda run: with_router(run, reservations=1),
        "every reservation ended",
    ),
    "an index with one block too many": (
        lambda run: with_worker(run, held=Held(blocks=4, digest=7 ^ 1234)),
        "the index equals",
    ),
    "an index with another block": (
        lambda run: with_worker(run, held=Held(blocks=3, digest=8)),
        "the index equals",
    ),
    "a worker that is unknown": (
        lambda run: with_router(run, workers={"worker-1": seen("worker-1")}),
        "the index equals",
    ),
    "load that stays": (lambda run: with_worker(run, load=1.0), "loads are zero"),
    "blocks that stay": (lambda run: with_worker(run, blocks=0.5), "loads are zero"),
    "a worker that gets nothing": (
        lambda run: with_worker(run, excluded="drained"),
        "every worker gets requests",
    ),
    "memory that grew": (
        lambda run: with_router(run, quiet=Memory(resident=1, malloc=111, objects=1)),
        "memory in use",
    ),
    "objects that grew": (
        lambda run: with_router(run, quiet=Memory(resident=1, malloc=1, objects=1101)),
        "memory in use",
    ),
    "memory that goes on growing": (
        lambda run: msgspec.structs.replace(run, resident=growing(1.1)),
        "the least of resident memory grows",
    ),
    "memory that goes on growing for an hour": (
        lambda run: long(run, 0.3),
        "the least of resident memory grows by less than 0.2 MiB a minute after 10 minutes",
    ),
    "a failure before the first byte": (
        lambda run: plus(run, served(at(REFUSED, 100.15), failure="refused")),
        "with attempts, no failure before",
    ),
    "a request that no router took": (
        lambda run: plus(run, served(failure=LOST)),
        "with attempts, no failure before",
    ),
    "a request that was refused as wrong over a line that is well": (
        lambda run: plus(
            run,
            served(failure=WRONG),
            trouble(Cause.LINE_CORRUPT, 99.0, 101.0, client=1, router=0),
        ),
        "with attempts, no failure before",
    ),
    "a machine without a core": (
        lambda run: plus(run, no_core(150.0, 152.3)),
        "no core was away",
    ),
    "a failure before the first byte, though a core was away for a moment": (
        lambda run: plus(run, served(failure=LOST), no_core(100.2, 101.1)),
        "with attempts, no failure before",
    ),
    "a failure after the first byte, of a worker that is well": (
        lambda run: plus(run, served(at(GOOD, WELL, failure="broken"), failure="b", begun=True)),
        "what fails after its first byte",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_reported_by_its_law_alone(name: str) -> None:
    plant, law = PLANTED[name]
    (found,) = [one for one in judge(plant(a_good_run())) if not one.holds]
    assert found.law.startswith(law)
    assert found.broken == 1
    assert len(found.details) == 1


EXCUSED: dict[str, tuple[Served | Trouble, ...]] = {
    "a request to a dead worker before half a second": (late(LATE - 0.2),),
    "a pick of a router that went on less than half a second before": (
        late(),
        trouble(Cause.ROUTER_STOP, 100.3, LATE - 0.4, router=0),
    ),
    "a pick of the other router, where the one that was told is stopped": (
        late(replica="b"),
        trouble(Cause.ROUTER_STOP, 100.3, 104.0, router=0),
    ),
    "a pick of the other router while NATS is away": (
        late(replica="b"),
        trouble(Cause.NATS, 100.3, 104.0),
    ),
    "a pick after a failure that was reported over a line in trouble": (
        late(),
        trouble(Cause.LINE_SLOW, 100.0, 100.4, client=0, router=0),
    ),
    "a pick over a line in trouble": (
        late(),
        trouble(Cause.LINE_SLOW, LATE - 0.1, 104.0, client=0, router=0),
    ),
    "a fallback's pick of a worker that failed other clients alone": (
        msgspec.structs.replace(late(replica=""), client=1),
    ),
    "a pick less than half a second after a core was back": (late(), no_core(100.2, LATE - 0.4)),
    "a fallback's pick less than half a second after a core was back": (
        late(replica=""),
        no_core(100.2, LATE - 0.4),
    ),
    "a failure before the first byte while cores were away for a second": (
        served(failure=LOST),
        no_core(97.0, 97.7),
        no_core(97.6, 98.1),
    ),
    "a failure after the first byte while a core was away for a second": (
        served(at(GOOD, WELL, failure="slow"), failure="slow", begun=True),
        no_core(WELL - 2.0, WELL - 0.9),
    ),
    "one to a dead worker while no other is well": (
        late(),
        trouble(Cause.STOP, 99.0, 101.0, worker="worker-1"),
    ),
    "a failure while no worker is well": (
        served(at(REFUSED, 100.3), failure="refused"),
        trouble(Cause.STOP, 80.0, 100.0 - WELL_S + 1.0, worker="worker-1"),
    ),
    "a failure while both lines are cut": (
        served(failure=LOST),
        *(trouble(Cause.LINE_CUT, 99.0, 102.0, client=0, router=i) for i in range(2)),
    ),
    "a request that a corrupt line made another one": (
        served(failure=WRONG),
        trouble(Cause.LINE_CORRUPT, 99.0, 101.0, client=0, router=0),
    ),
    "a stream that broke off at a worker that was killed": (
        served(at(GOOD, 100.0, worker="worker-0", failure="broken"), failure="b", begun=True),
    ),
}


@pytest.mark.parametrize("name", EXCUSED)
def test_what_cannot_be_helped_breaks_no_law(name: str) -> None:
    assert broken(plus(a_good_run(), *EXCUSED[name])) == []


def test_a_clients_fallback_avoids_a_worker_for_so_long_alone() -> None:
    trouble = msgspec.structs.replace(KILLED, to_s=KILLED.to_s + AVOID_S)
    run = msgspec.structs.replace(a_good_run(), troubles=(trouble,))
    later = served(at(REFUSED, 100.3 + AVOID_S, replica=""), at(GOOD, 100.4 + AVOID_S))
    assert broken(plus(run, later)) == []


def test_late_requests_are_counted_from_the_first_failure_of_that_trouble() -> None:
    again = Trouble(cause=Cause.KILL, from_s=120.0, to_s=130.0, worker="worker-0")
    run = plus(a_good_run(), served(at(REFUSED, 121.0)), served(at(REFUSED, 121.9)))
    run = msgspec.structs.replace(run, troubles=(KILLED, again))
    ((trouble, failed_s, late),) = late_picks(run, frozenset({Cause.KILL}), LATE_S)
    assert (trouble, failed_s, late.sent_s) == (again, 121.1, 121.9)


def test_table_and_json_name_laws_faults_and_the_command_that_repeats_the_run() -> None:
    plant, _ = PLANTED["a reservation left open"]
    run = plant(a_good_run())
    told = table(run, judge(run), "make chaos SEED=5")
    assert "BROKEN       1          2  every reservation ended" in told
    assert "router-0 has 1 open" in told
    assert told.endswith("again: make chaos SEED=5\n")
    parts = numbers(run, judge(run), "make chaos SEED=5")
    assert msgspec.json.decode(msgspec.json.encode(parts))["command"] == "make chaos SEED=5"
    assert parts["faults"] == {"kill -9": 1}
    assert parts["failed_before_first_byte"] == {}
