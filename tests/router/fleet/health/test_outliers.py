"""Outlier detection: which workers get none for a while, on whose word, and how they come back."""

from typing import Any

import pytest

from events.feed.replicas import EJECTED_MAX, Verdict
from indexer.identity import WorkerKey
from router.fleet.health.outliers import (
    BEING_PROBED,
    CALLERS_MAX,
    NEWS_MAX,
    OUTCOMES_MAX,
    Fault,
    OutlierBounds,
    Outliers,
)

W = [WorkerKey(f"w{i}", 0) for i in range(8)]


class Bench:
    """Outliers of eight workers, and their time."""

    def __init__(self, enabled: bool = True, **bounds: Any) -> None:
        self.now_s = 1000.0
        self.sampled_s: dict[WorkerKey, float] = {}
        self.changed: list[WorkerKey] = []
        self.outliers = Outliers(
            enabled,
            OutlierBounds(**bounds),
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


@pytest.fixture
def bench() -> Bench:
    return Bench()


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

    def test_one_refused_connection_ejects_at_once(self, bench: Bench) -> None:
        bench.fail(W[0], Fault.REFUSED)
        assert bench.outliers.reason(W[0]) == "ejected: connections refused"

    def test_one_callers_word_is_judged_between_two_ticks(self, bench: Bench) -> None:
        bench.serve(W[0], "b")
        bench.fail(W[0], Fault.REFUSED)
        assert bench.out() == set()
        bench.outliers.judge(bench.now_s + 0.29)
        assert bench.out() == set()
        bench.outliers.judge(bench.now_s + 0.31)
        assert bench.out() == {W[0]}

    def test_a_share_of_failures_ejects_from_enough_requests_on(self, bench: Bench) -> None:
        for i in range(9):
            bench.serve(W[0]) if i % 2 else bench.fail(W[0])
        assert bench.out() == set(), "nine are too few"
        bench.serve(W[0])
        bench.fail(W[0])
        assert bench.outliers.reason(W[0]) == "ejected: too many failures"

    def test_a_share_below_the_bound_ejects_nobody(self, bench: Bench) -> None:
        for i in range(200):
            bench.serve(W[0]) if i % 4 else bench.fail(W[0])
            bench.turn(0.05)
        assert bench.out() == set()

    def test_what_is_older_than_the_window_counts_no_more(self, bench: Bench) -> None:
        for _ in range(4):
            bench.fail(W[0])
            bench.serve(W[0])
        bench.turn(11)
        for _ in range(4):
            bench.fail(W[0])
            bench.serve(W[0])
        assert bench.out() == set()

    def test_switched_off_nothing_is_ejected_and_what_was_is_back(self, bench: Bench) -> None:
        bench.fail(W[0], Fault.REFUSED)
        bench.outliers.reconfigure(False)
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

    def test_probes_in_flight_are_one_more_than_were_served(self, bench: Bench) -> None:
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

    def test_answers_to_requests_from_before_an_ejection_are_no_probes(self, bench: Bench) -> None:
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
    def test_errors_alone_keep_out_half_of_a_pool_at_most(self, bench: Bench) -> None:
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
            "worker w0/0 gets no requests for 1.0 s: connections refused, as a alone reports",
            "worker w0/0 gets requests again: probes were served",
        ]
        assert bench.outliers.take_news() == []

    def test_a_forgotten_worker_leaves_nothing(self, bench: Bench) -> None:
        bench.serve(W[0], "b")
        bench.fail(W[0], Fault.REFUSED)
        bench.fail(W[1], Fault.REFUSED)
        bench.turn(1.1)
        for worker in W[:2]:
            bench.outliers.forget(worker)
        outliers = bench.outliers
        assert (outliers._standings, outliers._ejected, outliers._accused) == ({}, {}, {})
        assert (outliers.probing, bench.out()) == ({}, set())


class TestOneCallersWord:
    """A caller that lies, or can't reach a worker that others reach."""

    @pytest.mark.parametrize("fault", list(Fault))
    def test_it_ejects_nobody_whom_others_see_serve(self, fault: Fault, bench: Bench) -> None:
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

    def test_two_callers_eject_at_once(self, bench: Bench) -> None:
        bench.serve(W[0], "a")
        bench.serve(W[0], "b")
        bench.fail(W[0], Fault.REFUSED, caller="a")
        bench.fail(W[0], Fault.REFUSED, caller="b")
        assert bench.out() == {W[0]}

    def test_what_it_ejected_is_back_as_soon_as_another_is_served(self, bench: Bench) -> None:
        bench.fail(W[0], Fault.REFUSED, caller="liar")
        assert bench.out() == {W[0]}
        bench.turn(0.2)
        bench.serve(W[0], "honest", before_s=3)
        assert bench.out() == set()
        bench.fail(W[0], Fault.REFUSED, caller="liar", times=5)
        bench.turn(0.5)
        assert bench.out() == set(), "its word alone counts no more for a while"

    def test_an_honest_callers_single_failure_doesnt_make_it_true(self, bench: Bench) -> None:
        for i in range(400):
            bench.fail(W[0], caller="liar")
            bench.serve(W[0], "honest")
            if i % 50 == 10:
                bench.fail(W[0], caller="honest")
            bench.turn(0.05)
            assert bench.out() == set()

    def test_the_relay_speaks_for_a_worker_that_serves_others(self, bench: Bench) -> None:
        bench.fail(W[0], Fault.REFUSED, caller="liar")
        for seq in (10, 20, 30):
            bench.turn(0.3)
            bench.outliers.on_relay(W[0], 4.0, seq, bench.now_s)
        assert bench.out() == set()

    def test_the_relay_of_an_engine_that_computes_nothing_says_nothing(self, bench: Bench) -> None:
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

    def test_a_refusal_of_before_a_success_is_no_news(self, bench: Bench) -> None:
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

    def test_callers_that_were_refused_are_remembered_two_at_most(self, bench: Bench) -> None:
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

    def test_a_verdict_for_which_a_message_has_no_room_ends_by_time(self) -> None:
        here = Bench()
        here.outliers.hear("there", [Verdict(W[0], 20.0, "failures_in_a_row")], here.now_s)
        others = [WorkerKey(f"other-{i}", 0) for i in range(EJECTED_MAX)]
        told = [Verdict(worker, 20.0, "failures_in_a_row") for worker in others]
        here.outliers.hear("there", told, here.now_s)
        here.turn(0.1)
        assert here.out() == {W[0]}
        here.turn(20)
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
