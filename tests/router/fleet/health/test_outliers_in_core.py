"""Outlier detection with the real core, in turned time: picks around dead and failing workers."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from events.plane.facts import Stored, pack_hashes
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.decide.core.progress import Progress, ProgressState
from router.fleet.health.outliers import Cause
from router.fleet.reservations.reservations import Ending
from router.request.refusal import Reason, Refusal
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt


@dataclass
class Engine:
    """A stand-in worker: what becomes of a request there."""

    key: WorkerKey
    outcome: Callable[[random.Random], str] = lambda _: "served"
    """served, failed, refused or hangs"""
    picks: list[tuple[float, str]] = field(default_factory=list)
    """(when, what became of it)"""


class Traffic:
    """Requests at a steady rate, clients that report, relays that tell once a second."""

    def __init__(self, engines: int = 4, rate: float = 100.0, callers: int = 3) -> None:
        self.fleet = Fleet(index=NativeIndex())
        self.rng = random.Random(5)
        self.engines = {
            key: Engine(key)
            for key in (
                self.fleet.add(f"w{i}", total_slots=4000, total_blocks=10**6)
                for i in range(engines)
            )
        }
        self.rate, self.callers = rate, callers
        self.began_s = self.fleet.now_s
        self.silent: set[WorkerKey] = set()
        """Engines that their relays get no answer from."""
        self._due: list[tuple[float, str, Progress]] = []
        self._sent = 0
        self._told_s = self._ticked_s = self.fleet.now_s

    @property
    def at_s(self) -> float:
        return self.fleet.now_s - self.began_s

    def run(self, seconds: float) -> None:
        ends_s = self.fleet.now_s + seconds
        while self.fleet.now_s < ends_s:
            self.fleet.now_s += 1 / self.rate
            self.report()
            self.send()
            if self.fleet.now_s - self._ticked_s >= 0.25:
                self._ticked_s = self.fleet.now_s
                self.fleet.tick()
            if self.fleet.now_s - self._told_s >= 1.0:
                self._told_s = self.fleet.now_s
                self.tell()

    def send(self) -> None:
        self._sent += 1
        caller = f"caller-{self._sent % self.callers}"
        pick = self.fleet.route(prompt(200, first=1000 * self._sent)).reservation
        engine = self.engines[pick.worker]
        outcome = engine.outcome(self.rng)
        engine.picks.append((self.at_s, outcome))
        for after_s, progress in self.steps(pick.id, outcome):
            self._due.append((self.fleet.now_s + after_s, caller, progress))

    def steps(self, id: str, outcome: str) -> list[tuple[float, Progress]]:
        failed = Progress(id, ProgressState.FAILED, failure=Ending.FAILED_WORKER)
        refused = Progress(id, ProgressState.FAILED, failure=Ending.FAILED_REFUSED)
        given_up = Progress(id, ProgressState.FAILED, failure=Ending.FAILED_TIMEOUT)
        return {
            "served": [
                (0.05, Progress(id, ProgressState.PREFILL_DONE)),
                (0.5, Progress(id, ProgressState.FINISHED)),
            ],
            "failed": [(0.01, failed)],
            "refused": [(0.002, refused)],
            "hangs": [(30.0, given_up)],
        }[outcome]

    def report(self) -> None:
        now_s = self.fleet.now_s
        for one in [one for one in self._due if one[0] <= now_s]:
            self._due.remove(one)
            self.fleet.core.report(one[2], now_s, one[1])

    def tell(self) -> None:
        for key in self.engines:
            self.fleet.beat(key)
            sampled = self.fleet.relays[key].heartbeat.sampled_at_s
            self.fleet.say(key, **({"sampled_at_s": sampled} if key in self.silent else {}))

    def picks(self, since_s: float, *outcomes: str) -> int:
        return sum(
            at_s >= since_s and (not outcomes or what in outcomes)
            for engine in self.engines.values()
            for at_s, what in engine.picks
        )


def test_no_request_goes_to_a_dead_worker_half_a_second_after_its_first_refusal() -> None:
    traffic = Traffic()
    traffic.run(5)
    dead = next(iter(traffic.engines.values()))
    dead.outcome = lambda _: "refused"
    traffic.silent.add(dead.key)
    traffic.run(30)
    first_s = next(at_s for at_s, what in dead.picks if what == "refused")
    assert [at_s for at_s, _ in dead.picks if at_s > first_s + 0.5] == []
    assert traffic.picks(5, "refused") < 20
    dead.outcome = lambda _: "served"
    traffic.silent.clear()
    well_s = traffic.at_s
    traffic.run(3)
    assert sum(at_s >= well_s for at_s, _ in dead.picks) > 20, "it is back"


def test_heartbeats_that_come_late_do_not_open_a_dead_worker() -> None:
    traffic = Traffic()
    traffic.run(5)
    dead = next(iter(traffic.engines.values()))
    dead.outcome = lambda _: "refused"
    died_s = traffic.fleet.now_s
    tell = traffic.tell

    def tell_late() -> None:
        """As beside a flood: what the relay sent two seconds ago."""
        tell()
        sent_s = traffic.fleet.now_s - 2.0
        traffic.fleet.say(dead.key, sent_at_s=sent_s, sampled_at_s=min(sent_s, died_s))

    traffic.silent.add(dead.key)
    traffic.tell = tell_late  # type: ignore[method-assign]
    traffic.run(30)
    first_s = next(at_s for at_s, what in dead.picks if what == "refused")
    assert [at_s for at_s, _ in dead.picks if at_s > first_s + 0.5] == []


def test_of_one_that_fails_half_its_requests_and_one_that_hangs_clients_hardly_notice() -> None:
    traffic = Traffic()
    traffic.run(5)
    sick, hung, *_ = traffic.engines.values()
    sick.outcome = lambda rng: rng.choice(["served", "failed"])
    hung.outcome = lambda _: "hangs"
    began_s = traffic.at_s
    traffic.run(40)
    bad = traffic.picks(began_s + 2, "failed", "hangs")
    assert bad < 0.01 * traffic.picks(began_s + 2)
    causes = traffic.fleet.core.fleet.outliers.ejections
    assert causes[Cause.NO_FIRST_TOKEN] > 0
    assert causes[Cause.FAILURE_SHARE] + causes[Cause.FAILURES_IN_A_ROW] > 0
    for engine in (sick, hung):
        engine.outcome = lambda _: "served"
    traffic.run(25)
    back_s = traffic.at_s
    traffic.run(5)
    for engine in traffic.engines.values():
        assert sum(at_s >= back_s for at_s, _ in engine.picks) > 75, "in use again, as all others"
    assert not any(traffic.fleet.core.fleet.outliers.reason(key) for key in traffic.engines)


def test_a_liar_among_honest_callers_ejects_nobody() -> None:
    traffic = Traffic(callers=4)
    report = traffic.fleet.core.report

    def lie(progress: Progress, now_s: float, caller: str = "") -> Any:
        if caller == "caller-0":
            progress = Progress(
                progress.reservation_id, ProgressState.FAILED, failure=Ending.FAILED_REFUSED
            )
        return report(progress, now_s, caller)

    traffic.run(2)
    traffic.fleet.core.report = lie  # type: ignore[method-assign]
    traffic.run(20)
    assert traffic.fleet.core.fleet.outliers.ejections == {}
    assert traffic.fleet.core.endings[Ending.FAILED_REFUSED] > 100


class TestCore:
    def test_failures_of_clients_and_cancellations_never_count(self) -> None:
        fleet = Fleet("w0", "w1")
        for ending in (Ending.FAILED_CLIENT, Ending.FAILED_CANCELLED, Ending.FAILED_UNKNOWN):
            for _ in range(30):
                fail(fleet, fleet.route(prompt(100)).reservation.id, ending)
        assert fleet.core.fleet.outliers.ejections == {}
        assert sum(map(Counter.total, fleet.core.fleet.outcomes.values())) == 90

    def test_a_worker_that_fails_every_request_gets_few(self) -> None:
        fleet = Fleet()
        key, _ = fleet.add("w0"), fleet.add("w1")
        fleet.cache(key, prompt(100))
        picks = []
        for _ in range(100):
            found = fleet.route(prompt(100)).reservation
            picks.append(found.worker)
            if found.worker == key:
                fail(fleet, found.id, Ending.FAILED_WORKER)
            else:
                fleet.core.report(Progress(found.id, ProgressState.FINISHED), fleet.now_s, "a")
        assert picks.count(key) == 5
        assert fleet.core.fleet.excluded(fleet.view.sources[key]) == "ejected: failures in a row"
        assert fleet.core.fleet.outcomes[key] == {Ending.FAILED_WORKER: 5}
        assert fleet.core.endings == {Ending.FAILED_WORKER: 5, Ending.FINISHED: 95}

    def test_an_ejected_worker_is_tried_for_what_no_other_may_take(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0", labels={"zone": "a"})
        full = fleet.add("w1", labels={"zone": "b"}, total_slots=1)
        fail(fleet, fleet.route(prompt(1), required_labels={"zone": "a"}).reservation.id)
        assert fleet.core.fleet.last_resort(fleet.view.sources[key])
        assert fleet.picked(prompt(1), required_labels={"zone": "a"}) == "w0"
        assert fleet.core.last_resorts == 1
        fleet.say(full, running=1)
        with pytest.raises(Refusal) as caught:
            fleet.route(prompt(1))
        assert caught.value.reason is Reason.ALL_WORKERS_FULL, "the full one is waited for"
        receipt = fleet.decide(prompt(1))
        assert receipt.exclusions() == {"ejected: connections refused": 1, "full": 1}

    def test_of_those_that_fell_silent_together_an_ejected_one_comes_last(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}", labels={"zone": "ab"[i > 0]}) for i in range(5)]
        fleet.turn(5, silent=keys)
        assert {fleet.picked(prompt(100)) for _ in range(20)} == {key.worker_id for key in keys}
        fail(fleet, fleet.route(prompt(1), required_labels={"zone": "a"}).reservation.id)
        assert {fleet.picked(prompt(100)) for _ in range(20)} == {"w1", "w2", "w3", "w4"}
        assert fleet.picked(prompt(1), required_labels={"zone": "a"}) == "w0"
        for key in keys[1:]:
            fleet.core.drain(key.worker_id)
        assert fleet.picked(prompt(1)) == "w0"

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("prefilled", [True, False])
    def test_of_a_pair_the_half_that_failed_is_blamed(self, named: bool, prefilled: bool) -> None:
        fleet = Fleet()
        about = {"engine": "vllm", "kv_connector": "NixlConnector"}
        prefill, decode = (
            fleet.add("p", role="prefill", **about),
            fleet.add("d", role="decode", **about),
        )
        found = fleet.route(prompt(4000), role=Role.PAIR).reservation
        assert (found.prefill and found.prefill.worker, found.worker) == (prefill, decode)
        if prefilled:
            fleet.report(found, "prefill_done")
        fleet.report(
            found, "failed", failure=Ending.FAILED_REFUSED, failed_worker_id="p" if named else ""
        )
        blamed = prefill if named or not prefilled else decode
        assert fleet.core.fleet.outliers.reason(blamed)
        assert set(fleet.core.fleet.outcomes) == {blamed}

    def test_the_stream_bounds_probes_as_the_core_does(self) -> None:
        fleet = Fleet(index=NativeIndex())
        key, other = fleet.add("w0"), fleet.add("w1", running=70)
        found = fleet.route(prompt(100)).reservation
        assert found.worker == key
        fail(fleet, found.id)
        fleet.turn(2)
        assert set(fleet.core.fleet.outliers.probing) == {key}
        picks = [fleet.route(prompt(100, first=1000 * i)).reservation for i in range(10)]
        assert [one.worker for one in picks] == [key] + 9 * [other]
        fleet.core.report(Progress(picks[0].id, ProgressState.FINISHED), fleet.now_s, "a")
        picks = [fleet.route(prompt(100, first=2000 * i)).reservation for i in range(10)]
        assert [one.worker for one in picks].count(key) == 2

    def test_one_whose_callers_report_nothing_is_not_suspected(self) -> None:
        traffic = Traffic()
        traffic.report = lambda: traffic._due.clear()  # type: ignore[method-assign]
        traffic.run(20)
        assert traffic.fleet.core.fleet.outliers.ejections == {}

    def test_a_long_prompt_may_take_its_time(self) -> None:
        traffic = Traffic(rate=20)
        traffic.run(5)
        slow = next(iter(traffic.engines))
        fleet = traffic.fleet
        for i in range(4):
            size = 100_000
            asked = prompt(size, first=i << 20)
            found = fleet.route(asked, allowed_workers=frozenset({slow.worker_id}))
            assert found.reservation.worker == slow
        busy = traffic.engines[slow]
        busy.outcome = lambda _: "hangs"
        traffic.run(15)
        assert fleet.core.fleet.outliers.ejections == {}, (
            "400,000 tokens take 20 s at 20,000 a second"
        )

    def test_a_worker_that_computes_for_others_is_seen_to_serve_by_its_relay(self) -> None:
        fleet = Fleet()
        key, _ = fleet.add("w0", running=3), fleet.add("w1")
        fail(fleet, fleet.route(prompt(1), allowed_workers=frozenset({"w0"})).reservation.id)
        assert fleet.core.fleet.outliers.reason(key)
        for i in range(3):
            fleet.turn(0.3)
            fleet.tell(key, Stored(pack_hashes([i + 1]), "device"))
        assert fleet.core.fleet.outliers.reason(key) == ""


def fail(fleet: Fleet, reservation_id: str, ending: Ending = Ending.FAILED_REFUSED) -> None:
    failed = Progress(reservation_id, ProgressState.FAILED, failure=ending)
    fleet.core.report(failed, fleet.now_s, "a")
