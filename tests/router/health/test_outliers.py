"""Outlier detection: which workers get none for a while, on whose word, and how they come back."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from events.feed.peers import Verdict
from events.plane.facts import Stored, pack_hashes
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.config.settings import OutlierSettings
from router.core.progress import Progress, ProgressState
from router.health.outliers import (
    BEING_PROBED,
    CALLERS_MAX,
    NEWS_MAX,
    OUTCOMES_MAX,
    Cause,
    Fault,
    Outliers,
)
from router.request.refusal import Reason, Refusal
from router.request.request import Role
from router.reservations.reservations import Ending
from tests.stage.fleet import Fleet, prompt

W = [WorkerKey(f"w{i}", 0) for i in range(8)]


class Bench:
    """Outliers of eight workers, and their time."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 1000.0
        self.sampled_s: dict[WorkerKey, float] = {}
        self.changed: list[WorkerKey] = []
        self.outliers = Outliers(
            OutlierSettings(**settings),
            group=lambda _: W,
            sampled_at_s=self.sampled_s.get,
            on_change=self.changed.append,
        )
        self._ids = 0

    def fail(
        self, worker: WorkerKey, fault: Fault = Fault.ERROR, caller: str = "a", times: int = 1
    ) -> None:
        for _ in range(times):
            self.outliers.on_failed(worker, fault, caller, self.now_s, self.now_s)

    def serve(self, worker: WorkerKey, caller: str = "a", before_s: float = 0.0) -> None:
        opened_s = self.now_s - before_s
        self.outliers.on_served(worker, "earlier", caller, opened_s, self.now_s)

    def turn(self, seconds: float) -> None:
        for _ in range(round(seconds * 20)):
            self.now_s += 0.05
            self.outliers.tick(self.now_s)

    def probe(self, worker: WorkerKey) -> str:
        self._ids += 1
        self.outliers.on_pick(worker, f"probe-{self._ids}", self.now_s)
        return f"probe-{self._ids}"

    def end(self, worker: WorkerKey, probe: str, fault: Fault | None = None) -> None:
        if fault is None:
            self.outliers.on_served(worker, probe, "a", self.now_s, self.now_s)
        self.outliers.on_end(worker, probe)
        if fault is not None:
            self.fail(worker, fault)

    def out(self) -> set[WorkerKey]:
        return {worker for worker in W if self.outliers.reason(worker)}

    def ejected_for_s(self, worker: WorkerKey) -> float:
        standing = self.outliers.standing(worker)
        assert standing is not None
        return standing.until_s - self.now_s


class TestCauses:
    def test_failures_in_a_row_eject_and_a_success_between_begins_the_count_again(self) -> None:
        bench = Bench()
        bench.fail(W[0], times=4)
        bench.serve(W[0])
        bench.fail(W[0], times=4)
        assert bench.out() == set()
        bench.fail(W[0])
        assert bench.out() == {W[0]}
        assert bench.outliers.reason(W[0]) == "ejected: failures in a row"
        assert bench.changed == [W[0]]

    def test_one_refused_connection_ejects_at_once(self) -> None:
        bench = Bench()
        bench.fail(W[0], Fault.REFUSED)
        assert bench.outliers.reason(W[0]) == "ejected: connections refused"

    def test_one_callers_word_is_judged_between_two_ticks(self) -> None:
        bench = Bench()
        bench.serve(W[0], "b")
        bench.fail(W[0], Fault.REFUSED)
        assert bench.out() == set()
        bench.outliers.judge(bench.now_s + 0.29)
        assert bench.out() == set()
        bench.outliers.judge(bench.now_s + 0.31)
        assert bench.out() == {W[0]}

    def test_a_share_of_failures_ejects_from_enough_requests_on(self) -> None:
        bench = Bench()
        for i in range(9):
            bench.serve(W[0]) if i % 2 else bench.fail(W[0])
        assert bench.out() == set(), "nine are too few"
        bench.serve(W[0])
        bench.fail(W[0])
        assert bench.outliers.reason(W[0]) == "ejected: too many failures"

    def test_a_share_below_the_bound_ejects_nobody(self) -> None:
        bench = Bench()
        for i in range(200):
            bench.serve(W[0]) if i % 4 else bench.fail(W[0])
            bench.turn(0.05)
        assert bench.out() == set()

    def test_what_is_older_than_the_window_counts_no_more(self) -> None:
        bench = Bench()
        for _ in range(4):
            bench.fail(W[0])
            bench.serve(W[0])
        bench.turn(11)
        for _ in range(4):
            bench.fail(W[0])
            bench.serve(W[0])
        assert bench.out() == set()

    def test_switched_off_nothing_is_ejected_and_what_was_is_back(self) -> None:
        bench = Bench()
        bench.fail(W[0], Fault.REFUSED)
        bench.outliers.reconfigure(OutlierSettings(enabled=False))
        assert bench.out() == set()
        bench.fail(W[0], Fault.REFUSED, times=20)
        bench.outliers.hear("there", [Verdict(W[1], 1.0, "refused")], bench.now_s)
        bench.outliers.on_overdue(W[2], bench.now_s)
        assert bench.out() == set()


class TestTime:
    def test_an_ejection_doubles_up_to_the_longest_and_calm_begins_again(self) -> None:
        bench = Bench()
        lengths = []
        bench.fail(W[0], times=5)
        for _ in range(7):
            lengths.append(bench.ejected_for_s(W[0]))
            bench.turn(lengths[-1] + 0.1)
            assert bench.out() == set(), "it is probed"
            bench.end(W[0], bench.probe(W[0]), Fault.ERROR)
        assert lengths == pytest.approx([1, 2, 4, 8, 16, 20, 20])
        bench.turn(20.1)
        for _ in range(3):
            bench.end(W[0], bench.probe(W[0]))
        assert bench.outliers.standing(W[0]) is None
        bench.fail(W[0], times=5)
        assert bench.ejected_for_s(W[0]) == 20, "its last failures were a moment ago"
        bench.turn(20.1)
        for _ in range(3):
            bench.end(W[0], bench.probe(W[0]))
        bench.turn(60)
        bench.fail(W[0], times=5)
        assert bench.ejected_for_s(W[0]) == 1

    def test_probes_in_flight_are_one_more_than_were_served(self) -> None:
        bench = Bench()
        bench.fail(W[0], times=5)
        bench.turn(1.1)
        first = bench.probe(W[0])
        assert bench.outliers.reason(W[0]) == BEING_PROBED
        bench.end(W[0], first)
        second = bench.probe(W[0])
        assert bench.out() == set()
        third = bench.probe(W[0])
        assert bench.outliers.reason(W[0]) == BEING_PROBED
        bench.end(W[0], second)
        bench.end(W[0], third)
        assert bench.outliers.standing(W[0]) is None
        assert bench.outliers.probing == {}
        assert bench.outliers.probes == {"served": 3}

    def test_a_probe_that_its_client_gave_up_leaves_its_place_to_another(self) -> None:
        bench = Bench()
        bench.fail(W[0], times=5)
        bench.turn(1.1)
        bench.outliers.on_end(W[0], bench.probe(W[0]))
        assert bench.out() == set()
        assert bench.outliers.probes == {}

    def test_who_refuses_connections_is_probed_once_its_engine_has_answered_its_relay(self) -> None:
        bench = Bench()
        bench.sampled_s[W[0]] = bench.now_s - 0.1
        bench.fail(W[0], Fault.REFUSED)
        bench.turn(30)
        assert bench.out() == {W[0]}
        bench.sampled_s[W[0]] = bench.now_s
        bench.turn(0.1)
        assert bench.out() == set()
        bench.end(W[0], bench.probe(W[0]), Fault.REFUSED)
        bench.turn(30)
        assert bench.out() == {W[0]}

    def test_how_much_later_that_answer_must_be_is_as_configured(self) -> None:
        bench = Bench(sample_after_s=2.0)
        bench.fail(W[0], Fault.REFUSED)
        ejected_s = bench.now_s
        bench.sampled_s[W[0]] = ejected_s + 1.9
        bench.turn(5)
        assert bench.out() == {W[0]}
        bench.sampled_s[W[0]] = ejected_s + 2.0
        bench.turn(0.1)
        assert bench.out() == set()

    def test_answers_to_requests_from_before_an_ejection_are_no_probes(self) -> None:
        bench = Bench()
        for _ in range(5):
            bench.fail(W[0])
            bench.serve(W[0], "b")
            bench.fail(W[0], caller="b")
        assert bench.outliers.reason(W[0]) == "ejected: too many failures"
        bench.turn(0.5)
        for _ in range(5):
            bench.serve(W[0], before_s=0.6)
            bench.fail(W[0])
        assert bench.ejected_for_s(W[0]) == pytest.approx(0.5)


class TestBounds:
    def test_errors_alone_keep_out_half_of_a_pool_at_most(self) -> None:
        bench = Bench()
        for worker in W:
            bench.fail(worker, times=20)
        assert bench.out() == set(W[:4])
        assert bench.outliers.withheld["pool_percent"] == 4 * 16

    def test_refused_connections_timeouts_and_hangs_count_without_that_bound(self) -> None:
        bench = Bench()
        for worker in W[:3]:
            bench.fail(worker, Fault.REFUSED)
        for worker in W[3:6]:
            bench.fail(worker, Fault.TIMEOUT, times=5)
        for worker in W[6:]:
            bench.outliers.on_overdue(worker, bench.now_s)
        assert bench.out() == set(W)

    def test_callers_and_what_they_report_are_bounded(self) -> None:
        bench = Bench(failures=10_000, failure_percent=100)
        for i in range(3 * CALLERS_MAX):
            bench.serve(W[0], f"caller-{i}")
        for _ in range(3 * OUTCOMES_MAX):
            bench.fail(W[0], caller="one")
        standing = bench.outliers._standings[W[0]]
        assert len(standing.voices) == CALLERS_MAX
        assert standing.voices["one"].since(0.0) == (OUTCOMES_MAX, OUTCOMES_MAX)
        assert len(standing.voices["one"].times) == OUTCOMES_MAX
        assert bench.outliers.callers_forgotten == 2 * CALLERS_MAX + 1
        assert len(standing.accusers) <= 2

    def test_news_are_bounded_and_taken_once(self) -> None:
        bench = Bench(calm_s=0.001)
        for _ in range(NEWS_MAX):
            bench.fail(W[0], Fault.REFUSED)
            bench.turn(1.1)
            for _ in range(3):
                bench.end(W[0], bench.probe(W[0]))
        news = bench.outliers.take_news()
        assert len(news) == NEWS_MAX
        assert news[-2:] == [
            "worker w0/0 gets no requests for 1.0 s: connections refused, on the word of a",
            "worker w0/0 gets requests again: probes were served",
        ]
        assert bench.outliers.take_news() == []

    def test_a_forgotten_worker_leaves_nothing(self) -> None:
        bench = Bench()
        bench.serve(W[0], "b")
        bench.fail(W[0], Fault.REFUSED)
        bench.fail(W[1], Fault.REFUSED)
        bench.turn(1.1)
        for worker in W[:2]:
            bench.outliers.forget(worker)
        outliers = bench.outliers
        assert (outliers._standings, outliers._out, outliers._accused) == ({}, {}, {})
        assert (outliers.probing, bench.out()) == ({}, set())


class TestOneCallersWord:
    """A caller that lies, or can't reach a worker that others reach."""

    @pytest.mark.parametrize("fault", list(Fault))
    def test_it_ejects_nobody_whom_others_see_serve(self, fault: Fault) -> None:
        bench = Bench()
        bench.serve(W[0], "honest-0")
        for i in range(2000):  # a minute and a half
            bench.fail(W[0], fault, caller="liar", times=3)
            if i % 3 == 0:
                bench.serve(W[0], f"honest-{i % 4}", before_s=0.3)
            bench.turn(0.05)
            assert bench.out() == set()
        assert bench.outliers.ejections == {}
        assert bench.outliers.withheld["disputed"] > 0

    def test_it_ejects_a_worker_that_nobody_else_is_seen_to_be_served_by(self) -> None:
        bench = Bench()
        bench.serve(W[0], "honest")
        bench.turn(0.2)
        bench.fail(W[0], Fault.REFUSED, caller="first")
        assert bench.out() == set(), "the other one may know better"
        bench.turn(0.35)
        assert bench.out() == {W[0]}

    def test_how_long_it_waits_is_as_configured(self) -> None:
        bench = Bench(alone_s=0.5, refused_alone_s=2.0)
        for worker in W[:2]:
            bench.serve(worker, "honest")
        bench.turn(0.2)
        bench.fail(W[0], Fault.REFUSED, caller="first")
        bench.fail(W[1], caller="first", times=5)
        bench.turn(1.5)
        assert bench.out() == {W[1]}
        bench.turn(1.0)
        assert W[0] in bench.out()

    @pytest.mark.parametrize(("grace_s", "is_cleared"), [(0.1, True), (0.5, False)])
    def test_a_success_within_the_grace_clears_nobody(
        self, grace_s: float, is_cleared: bool
    ) -> None:
        bench = Bench(grace_s=grace_s)
        bench.serve(W[0], "honest")
        bench.turn(0.2)
        bench.fail(W[0], Fault.REFUSED, caller="first")
        bench.turn(0.25)
        bench.serve(W[0], "honest")
        bench.turn(0.5)
        assert bench.out() == (set() if is_cleared else {W[0]})

    def test_two_callers_eject_at_once(self) -> None:
        bench = Bench()
        bench.serve(W[0], "a")
        bench.serve(W[0], "b")
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.fail(W[0], Fault.REFUSED, caller="b")
        assert bench.out() == {W[0]}

    def test_what_it_ejected_is_back_as_soon_as_another_is_served(self) -> None:
        bench = Bench()
        bench.fail(W[0], Fault.REFUSED, caller="liar")
        assert bench.out() == {W[0]}
        bench.turn(0.2)
        bench.serve(W[0], "honest", before_s=3)
        assert bench.out() == set()
        bench.fail(W[0], Fault.REFUSED, caller="liar", times=5)
        bench.turn(0.5)
        assert bench.out() == set(), "its word alone counts no more for a while"

    def test_an_honest_callers_single_failure_doesnt_make_it_true(self) -> None:
        bench = Bench()
        for i in range(400):
            bench.fail(W[0], caller="liar")
            bench.serve(W[0], "honest")
            if i % 50 == 10:
                bench.fail(W[0], caller="honest")
            bench.turn(0.05)
            assert bench.out() == set()

    def test_the_relay_speaks_for_a_worker_that_serves_others(self) -> None:
        bench = Bench()
        bench.fail(W[0], Fault.REFUSED, caller="liar")
        for seq in (10, 20, 30):
            bench.turn(0.3)
            bench.outliers.on_relay(W[0], 4.0, seq, bench.now_s)
        assert bench.out() == set()

    def test_the_relay_of_an_engine_that_computes_nothing_says_nothing(self) -> None:
        bench = Bench()
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.sampled_s[W[0]] = bench.now_s - 1
        for _ in range(3):
            bench.turn(0.5)
            bench.outliers.on_relay(W[0], 4.0, 10, bench.now_s)
        assert bench.out() == {W[0]}


class TestAClosedPort:
    """An engine that is killed, or ends in order: it refuses connections, while successes of
    requests that were picked before are still to be heard of."""

    def test_two_callers_eject_it_whatever_was_served_between_their_words(self) -> None:
        bench = Bench()
        bench.serve(W[0], "c")
        bench.turn(0.2)
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.turn(0.15)
        bench.serve(W[0], "c", before_s=0.4)
        bench.turn(0.05)
        bench.fail(W[0], Fault.REFUSED, caller="b")
        assert bench.out() == {W[0]}
        bench.turn(0.2)
        bench.serve(W[0], "c", before_s=0.7)
        assert bench.out() == {W[0]}

    def test_a_verdict_of_a_replica_stands_once_two_of_our_callers_are_refused(self) -> None:
        here = Bench()
        here.serve(W[0], "c")
        here.turn(0.2)
        here.fail(W[0], Fault.REFUSED, caller="a")
        here.outliers.hear("there", [Verdict(W[0], 1.0, "refused")], here.now_s)
        here.fail(W[0], Fault.REFUSED, caller="b")
        here.turn(0.2)
        here.serve(W[0], "c", before_s=0.5)
        assert here.out() == {W[0]}

    def test_a_request_that_was_picked_later_and_served_says_that_the_port_is_open(self) -> None:
        bench = Bench()
        bench.serve(W[0], "c")
        bench.turn(0.2)
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.turn(0.25)
        bench.serve(W[0], "c", before_s=0.1)
        bench.fail(W[0], Fault.REFUSED, caller="b")
        assert bench.out() == set()

    def test_a_refusal_of_before_a_success_is_no_news(self) -> None:
        bench = Bench()
        bench.serve(W[0], "c")
        bench.turn(0.2)
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.turn(0.2)
        bench.serve(W[0], "c")
        for caller in "ab":
            opened_s = bench.now_s - 0.3
            bench.outliers.on_failed(W[0], Fault.REFUSED, caller, opened_s, bench.now_s)
            bench.turn(0.15)
            bench.serve(W[0], "c", before_s=1)
        assert bench.out() == set()

    def test_refusals_that_are_far_apart_are_two_callers_words_alone(self) -> None:
        bench = Bench(window_s=2.0)
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.turn(0.2)
        bench.serve(W[0], "c", before_s=1)
        for _ in range(8):
            bench.turn(0.3)
            bench.serve(W[0], "c", before_s=3)
        bench.fail(W[0], Fault.REFUSED, caller="b")
        assert bench.out() == set()
        assert bench.outliers._standings[W[0]].refusers == {"b"}

    def test_callers_that_were_refused_are_remembered_two_at_most(self) -> None:
        bench = Bench()
        for i in range(10):
            bench.fail(W[0], Fault.REFUSED, caller=f"caller-{i}")
        assert len(bench.outliers._standings[W[0]].refusers) == 2


class TestReplicas:
    def test_verdicts_are_believed_until_they_end_and_then_probed(self) -> None:
        there, here = Bench(), Bench()
        there.fail(W[0], times=5)
        here.outliers.hear("there", there.outliers.verdicts(there.now_s), here.now_s)
        assert here.outliers.reason(W[0]) == "ejected: by another replica"
        assert here.outliers.verdicts(here.now_s) == [], "hearsay is not told on"
        here.turn(1.1)
        assert here.out() == set()
        assert set(here.outliers.probing) == {W[0]}

    def test_a_verdict_that_is_told_no_more_ends(self) -> None:
        here = Bench()
        here.outliers.hear("there", [Verdict(W[0], 20.0, "failures_in_a_row")], here.now_s)
        here.outliers.hear("elsewhere", [], here.now_s)
        here.turn(0.1)
        assert here.out() == {W[0]}
        here.outliers.hear("there", [], here.now_s)
        here.turn(0.1)
        assert here.out() == set()

    def test_what_is_said_to_refuse_connections_waits_for_its_relay(self) -> None:
        here = Bench()
        here.sampled_s[W[0]] = here.now_s
        here.outliers.hear("there", [Verdict(W[0], 1.0, "refused")], here.now_s)
        here.turn(5)
        assert here.out() == {W[0]}

    def test_verdicts_keep_out_no_more_than_half_of_a_pool_and_not_for_long(self) -> None:
        here = Bench()
        told = [Verdict(worker, 1e9, "refused") for worker in W]
        here.outliers.hear("there", told, here.now_s)
        assert here.out() == set(W[:4])
        assert here.ejected_for_s(W[0]) == 20

    def test_our_own_callers_know_better(self) -> None:
        here = Bench()
        told = [Verdict(W[0], 20.0, "refused")]
        here.outliers.hear("there", told, here.now_s)
        here.turn(0.2)
        here.serve(W[0], "b", before_s=1)
        assert here.out() == set()
        here.outliers.hear("there", told, here.now_s)
        assert here.out() == set()


# --- with the real core, in turned time ---


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
        fleet = Fleet()
        for name in ("w0", "w1"):
            fleet.add(name)
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
        receipt = fleet.core.decide(fleet.request(prompt(1)), fleet.now_s)
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
            fleet.core.report(Progress(found.id, ProgressState.PREFILL_DONE), fleet.now_s)
        failed = Progress(
            found.id,
            ProgressState.FAILED,
            failure=Ending.FAILED_REFUSED,
            failed_worker_id="p" if named else "",
        )
        fleet.core.report(failed, fleet.now_s)
        blamed = prefill if named or not prefilled else decode
        assert fleet.core.fleet.outliers.reason(blamed)
        assert set(fleet.core.fleet.outcomes) == {blamed}

    def test_the_lane_bounds_probes_as_the_core_does(self) -> None:
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
