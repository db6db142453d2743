"""Warnings: what is told of a worker, when, and how often it is said."""

import pytest

from events.feed.fleet_view import Source
from events.feed.stream import BEAT_OVERDUE_S, RECOVERIES_FREE, Stream
from events.plane.facts import VERSION, Beat, Epoch
from indexer.hashing import MultimodalItem
from indexer.identity import WorkerKey
from router.fleet.health.self_check import Record
from router.fleet.health.warnings import (
    CLOCK_SKEW_S,
    LINES_MAX,
    NEVER_RUN,
    PARTIAL_S,
    RELAY_SENTENCES_MAX,
    REPEAT_S,
    SAID_ONCE_MAX,
    SENTENCE_MAX,
    STALE_RESYNCS,
    UNHEARD_S,
    Experience,
    WarningCode,
    WarningLog,
    WorkerWarning,
    warnings_of,
)
from router.fleet.state import IGNORED_MAX
from router.request.request import Role
from tests.router.fleet.health.test_self_check import HELD, HELD_TOKENS, Engines
from tests.stage.fleet import Fleet, prompt


def known(
    record: Record | None = None,
    unheard_s: float | None = None,
    is_complete: bool = True,
    sizes: dict[int, int] | None = None,
) -> Experience:
    return Experience(record or Record(), unheard_s, is_complete, sizes or {16: 4})


FINE = known()


def a_source(**about: object) -> Source:
    """One worker's source: live, complete, and with an event told."""
    fleet = Fleet()
    key = fleet.add("w0", **about)
    fleet.cache(key, prompt(100))
    return fleet.view.sources[key]


def told(source: Source, dealings: Experience = FINE, after_s: float = 0.0) -> dict[str, str]:
    """Code -> sentence; there is one of each."""
    warnings = warnings_of(source, dealings, source.stream.changed_at_s + after_s)
    assert len({one.code for one in warnings}) == len(warnings)
    return {one.code.value: one.sentence for one in warnings}


def of(fleet: Fleet, key: WorkerKey) -> list[str]:
    return [one.code for one in fleet.core.fleet.warnings(fleet.view.sources[key], fleet.now_s)]


class TestOneWorker:
    def test_a_worker_that_is_as_it_should_be_has_none(self) -> None:
        assert told(a_source(engine_version="0.9.2")) == {}

    def test_before_its_first_heartbeat_there_is_nothing_to_tell(self) -> None:
        source = a_source()
        source.heartbeat = None
        assert told(source, known(unheard_s=1e6, sizes={16: 1, 32: 1})) == {}

    @pytest.mark.parametrize(("skew_s", "is_told"), [(5.0, False), (5.1, True), (-5.1, True)])
    def test_clocks_that_differ(self, skew_s: float, is_told: bool) -> None:
        source = a_source()
        source.clock_skew_s = skew_s
        assert (abs(skew_s) > CLOCK_SKEW_S) == is_told == ("clock_skew" in told(source))

    def test_the_relays_own_sentences_are_passed_on_up_to_a_bound(self) -> None:
        many = ("x" * (SENTENCE_MAX + 1), *map(str, range(RELAY_SENTENCES_MAX)))
        source = a_source(warnings=many)
        warnings = warnings_of(source, FINE, 0.0)
        assert {one.code for one in warnings} == {WarningCode.RELAY}
        sentences = [one.sentence for one in warnings]
        assert sentences == ["x" * SENTENCE_MAX, *many[1:RELAY_SENTENCES_MAX]]

    def test_codes_of_the_relay_go_with_its_first_sentences(self) -> None:
        source = a_source(
            warnings=("fails", "ranks", "strange", "plain"),
            warning_codes=("relay_failing", "ranks", "of a later release"),
        )
        assert warnings_of(source, FINE, 0.0) == [
            (WarningCode.RELAY_FAILING, "fails"),
            (WarningCode.RANKS, "ranks"),
            (WarningCode.RELAY, "strange"),
            (WarningCode.RELAY, "plain"),
        ]
        source = a_source(warnings=("only",), warning_codes=("ranks", "ranks"))
        assert warnings_of(source, FINE, 0.0) == [(WarningCode.RANKS, "only")]

    @pytest.mark.parametrize(
        ("engine", "version", "is_old"),
        [
            ("vllm", "0.8.5.post1", True),
            ("vllm", "v0.8", True),
            ("vllm", "0.9", False),
            ("vllm", "0.9.0", False),
            ("vllm", "0.32.0+cpu", False),
            ("vllm", "1.0.0", False),
            ("vllm", "dev", False),
            ("vllm", "", False),
            ("sglang", "0.4.5", True),
            ("sglang", "0.4.6.post5", False),
            ("dynamo", "0.1", False),
        ],
    )
    def test_releases_before_the_first_that_was_tried(
        self, engine: str, version: str, is_old: bool
    ) -> None:
        source = a_source(engine=engine, engine_version=version)
        assert set(told(source)) == ({"engine_version"} if is_old else set())

    def test_two_relays_for_one_worker(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        newer = fleet.relays[key]
        fleet.now_s -= 100
        older = Fleet()
        older.now_s = fleet.now_s
        older.view = fleet.view
        older.core = fleet.core
        fleet.now_s += 100
        older.add("w0")
        for _ in range(3):
            older.now_s = fleet.now_s
            older.beat(key)
        assert fleet.view.sources[key].stream.epoch == newer.epoch
        assert of(fleet, key) == ["two_relays"]

    def test_a_stream_that_never_stays_right(self) -> None:
        source = a_source()
        stream = source.stream = Stream(3.0, 0.0)
        stream.on_beat(Beat(VERSION, Epoch(1, 0), 0, 0, 0, True, 0.0), 0, 0, 0.0)
        for i in range(RECOVERIES_FREE + 1):
            assert "unsteady" not in told(source)
            stream.on_beat(Beat(VERSION, Epoch(1, 0), 0, 1, i, True, 0.0), 0, 0, 0.0)
            stream.on_snapshot(Epoch(1, 0), 0, True, 0.0)
        assert "4 times in a row" in told(source)["unsteady"]


class TestBlockSizes:
    def test_a_size_that_fits_no_canonical_one(self) -> None:
        sentence = told(a_source(block_size=0, engine_block_size=24))["block_size"]
        assert "24 tokens" in sentence

    @pytest.mark.parametrize(
        ("unheard_s", "is_told"), [(None, False), (UNHEARD_S - 1, False), (UNHEARD_S, True)]
    )
    def test_an_unknown_size_of_a_worker_that_gets_requests(
        self, unheard_s: float | None, is_told: bool
    ) -> None:
        dealings = known(unheard_s=unheard_s)
        assert ("block_size" in told(a_source(block_size=0), dealings)) == is_told

    def test_another_size_than_most_workers_of_the_model(self) -> None:
        sizes = {16: 1, 32: 3}
        sentence = told(a_source(), known(sizes=sizes))["block_size"]
        assert "1 of 16, 3 of 32" in sentence
        assert told(a_source(block_size=32), known(sizes=sizes)) == {}

    def test_when_no_size_is_the_commonest_all_are_told(self) -> None:
        for size in (16, 32):
            dealings = known(sizes={16: 2, 32: 2, 64: 1})
            assert "block_size" in told(a_source(block_size=size), dealings)

    def test_unknown_blocks_are_told_with_what_they_cost(self) -> None:
        sentence = told(a_source(total_blocks=None))["blocks_unknown"]
        assert "longer to their first token" in sentence
        assert "set total_blocks" in sentence
        assert told(a_source(total_blocks=1)) == {}

    def test_sizes_are_compared_among_workers_of_one_model_by_any_of_its_names(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}", block_size=32) for i in range(2)]
        odd = fleet.add("odd", block_size=16)
        other = fleet.add("other", block_size=64, model="another")
        fleet.tick()
        assert [of(fleet, key) for key in (*keys, odd, other)] == [[], [], ["block_size"], []]
        fleet.core.remove("odd", 60.0, fleet.now_s)
        fleet.say(keys[0], block_size=64)
        fleet.say(keys[1], block_size=64)
        fleet.turn(1)
        assert [of(fleet, key) for key in (*keys, other)] == [[], [], []]


class TestEvents:
    def test_requests_without_events_are_told_after_a_while(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        fleet.turn(100)
        assert of(fleet, key) == [], "it got no request"
        fleet.route(prompt(100))
        fleet.turn(1)
        fleet.turn(UNHEARD_S - 1)
        assert of(fleet, key) == []
        fleet.turn(1)
        assert of(fleet, key) == ["no_events"]
        fleet.cache(key, prompt(100))
        fleet.turn(1)
        assert of(fleet, key) == []

    def test_an_idle_engine_whose_relay_began_anew_has_nothing_to_publish(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        fleet.route(prompt(100))
        fleet.cache(key, prompt(100))
        fleet.turn(10)
        fleet.add("w0")  # of a higher epoch, and empty
        fleet.turn(2 * UNHEARD_S)
        assert of(fleet, key) == []
        fleet.route(prompt(100))
        fleet.turn(1 + UNHEARD_S)
        assert of(fleet, key) == ["no_events"]

    def test_sglangs_decode_workers_keep_no_cache_and_need_not_publish(self) -> None:
        fleet = Fleet()
        fleet.add("p", role="prefill", engine="sglang")
        key = fleet.add("d", role="decode", engine="sglang")
        fleet.route(prompt(1600), role=Role.PAIR)
        fleet.turn(2 * UNHEARD_S)
        assert of(fleet, key) == []

    def test_an_engine_that_publishes_none_is_told_as_approximate_alone(self) -> None:
        source = a_source(events=False)
        source.stream.complete = False
        record = Record(phantom_run=NEVER_RUN, resyncs=STALE_RESYNCS)
        assert set(told(source, known(record, 1e6), 1e6)) == {"approximate"}

    def test_a_stream_that_stays_partial(self) -> None:
        source = a_source()
        source.stream.complete = False
        assert told(source, after_s=PARTIAL_S - 1) == {}
        assert set(told(source, after_s=PARTIAL_S)) == {"partial"}

    def test_a_stream_that_leaves_blocks_out_says_why(self) -> None:
        source = a_source()
        lacks = known()._replace(lacks=("ledger_full", "unnamed_lora", "of a later release"))
        sentence = told(source, lacks)["left_out"]
        assert "more blocks than a relay's ledger" in sentence
        assert "only numbers of LoRAs" in sentence
        assert "'of a later release'" in sentence
        source.stream.complete = False
        assert told(source, lacks) == {}, "a partial stream has its own warning"

    def test_images_on_sglang(self) -> None:
        fleet = Fleet()
        sglang = fleet.add("s", engine="sglang")
        vllm = fleet.add("v")
        fleet.route(prompt(100))
        assert of(fleet, sglang) == []
        fleet.route(prompt(100, items=[MultimodalItem(5, 20, 10)]))
        assert of(fleet, sglang) == ["left_out"]
        assert of(fleet, vllm) == []

    def test_salts_that_a_release_does_not_tell(self) -> None:
        fleet = Fleet()
        old = fleet.add("old", tells_salts=False)
        new = fleet.add("new")
        fleet.route(prompt(100))
        assert of(fleet, old) == []
        fleet.route(prompt(100, cache_salt="tenant"))
        assert of(fleet, old) == ["left_out"]
        assert not fleet.view.complete(fleet.view.sources[old])
        assert of(fleet, new) == []

    def test_a_stream_that_is_not_live_claims_nothing(self) -> None:
        source = a_source()
        source.stream.complete = False
        source.stream.on_tick(source.stream.last_beat_s + BEAT_OVERDUE_S)
        record = Record(blind_run=NEVER_RUN, phantom_run=NEVER_RUN, resyncs=STALE_RESYNCS)
        assert told(source, known(record, 1e6), 1e6) == {}


class TestReports:
    def test_reuse_that_a_worker_of_dynamo_never_told_may_be_eagles(self) -> None:
        record = Record(blind_run=NEVER_RUN)
        assert "EAGLE" in told(a_source(engine="dynamo"), known(record))["hashes_never_match"]
        assert "EAGLE" not in told(a_source(), known(record))["hashes_never_match"]

    def test_reuse_that_is_never_predicted(self) -> None:
        fleet = Engines()
        key = fleet.add("w0")
        fleet.cache(key, prompt(100, 9000))  # under other hashes than the prompt has here
        for _ in range(NEVER_RUN):
            assert of(fleet, key) == []
            fleet.serves("w0", HELD_TOKENS)
        assert of(fleet, key) == ["hashes_never_match"]
        fleet.beat(key, complete=False)
        assert of(fleet, key) == [], "a partial stream may well lack them"
        fleet.beat(key)
        fleet.serves("w0", 64, prompt(80, 9000))
        assert of(fleet, key) == [], "one that matched"

    def test_predictions_of_which_nothing_ever_comes_true(self) -> None:
        fleet = Engines()
        key = fleet.holding("w0")
        for _ in range(NEVER_RUN):
            assert of(fleet, key) == []
            fleet.serves("w0", 0)
        assert of(fleet, key) == ["hashes_never_match"]
        fleet.serves("w0", 0, prompt(100, 9000))
        assert of(fleet, key) == ["hashes_never_match"], "that one says nothing"
        fleet.serves("w0", HELD_TOKENS)
        assert of(fleet, key) == []

    def test_resyncs_that_help_nothing(self) -> None:
        fleet = Engines()
        key = fleet.holding("w0")
        for _ in range(STALE_RESYNCS):
            assert of(fleet, key) == []
            fleet.turn(100)
            for _ in range(3):
                fleet.serves("w0", 32)
            fleet.answer(fleet.resyncs())
        assert of(fleet, key) == ["stale"]
        for _ in range(3):
            fleet.serves("w0", HELD_TOKENS, HELD)
        assert of(fleet, key) == []


class TestIgnoredPriorities:
    def test_the_first_worker_of_a_model_has_the_warning_until_it_leaves(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}") for i in range(2)]
        other = fleet.add("other", model="n", priority_scheduling="higher")
        sources = fleet.view.sources
        for key in (*reversed(keys), other):
            fleet.core.fleet.note_priority(sources[key])
        warnings = {key: of(fleet, key) for key in (*keys, other)}
        assert warnings == {keys[0]: [], keys[1]: ["priority_ignored"], other: []}
        fleet.core.remove("w1", 1.0, fleet.now_s)
        assert not len(fleet.core.fleet.ignored_priorities)
        fleet.core.fleet.note_priority(sources[keys[0]])
        assert of(fleet, keys[0]) == ["priority_ignored"]

    def test_it_ends_once_the_engine_schedules_by_priority(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        fleet.core.fleet.note_priority(fleet.view.sources[key])
        assert of(fleet, key) == ["priority_ignored"]
        fleet.add("w0", priority_scheduling="lower")
        assert of(fleet, key) == []

    def test_models_are_bounded(self) -> None:
        fleet = Fleet()
        for number in range(IGNORED_MAX + 1):
            key = fleet.add(f"w{number}", model=f"model-{number}")
            fleet.core.fleet.note_priority(fleet.view.sources[key])
        ignored = fleet.core.fleet.ignored_priorities
        assert len(ignored) == IGNORED_MAX
        assert f"model-{IGNORED_MAX}" not in ignored


class TestLog:
    def test_what_may_be_intended_has_one_line_in_a_routers_life(self) -> None:
        log, one = WarningLog(), self.many(1, WarningCode.PRIORITY_IGNORED)
        other = [(WorkerKey("another", 0), one[0][1])]
        said = [log.lines(lines, now_s) for lines in (one, other) for now_s in (0.0, 2 * REPEAT_S)]
        assert said == [["worker w0/0: odd (priority_ignored)"], [], [], []]

    def test_lines_of_a_routers_life_are_bounded(self) -> None:
        log, key = WarningLog(), WorkerKey("w", 0)
        said = [
            log.lines([(key, WorkerWarning(WarningCode.PRIORITY_IGNORED, str(n)))], n * REPEAT_S)
            for n in range(SAID_ONCE_MAX + 1)
        ]
        assert [len(lines) for lines in said] == [1] * SAID_ONCE_MAX + [0]

    def many(
        self, count: int, code: WarningCode = WarningCode.RELAY
    ) -> list[tuple[WorkerKey, WorkerWarning]]:
        return [(WorkerKey(f"w{i}", 0), WorkerWarning(code, "odd")) for i in range(count)]

    def test_a_warning_gets_a_line_when_it_appears_and_every_ten_minutes_while_it_stays(
        self,
    ) -> None:
        log, one = WarningLog(), self.many(1)
        assert log.lines([], 0.0) == []
        said_s = [now_s for now_s in range(0, 2000, 5) if log.lines(one, float(now_s))]
        assert said_s == [0, 600, 1200, 1800]

    def test_one_that_comes_and_goes_is_said_no_more_often(self) -> None:
        log, one = WarningLog(), self.many(1)
        said = 0
        for now_s in range(0, int(REPEAT_S), 10):
            said += len(log.lines(one if now_s % 20 else [], float(now_s)))
        assert said == 1

    def test_each_code_has_a_line_of_its_own_and_all_its_sentences(self) -> None:
        key = WorkerKey("w", 3)
        log = WarningLog()
        lines = log.lines(
            [
                (key, WorkerWarning(WarningCode.RELAY, "one")),
                (key, WorkerWarning(WarningCode.CLOCK_SKEW, "two")),
                (key, WorkerWarning(WarningCode.RELAY, "three")),
            ],
            0.0,
        )
        assert lines == ["worker w/3: one; three (relay)", "worker w/3: two (clock_skew)"]

    @pytest.mark.parametrize("more", [0, 1, 990])
    def test_lines_are_bounded_and_the_rest_is_counted(self, more: int) -> None:
        log = WarningLog()
        lines = log.lines(self.many(LINES_MAX + more), 0.0)
        assert len(lines) == LINES_MAX + bool(more)
        if more:
            assert lines[-1] == f"{more} more warnings of workers: `kvroute workers` shows all"
        assert log.lines(self.many(LINES_MAX + more), 5.0) == [], "they were counted: that will do"

    def test_what_was_said_long_ago_is_forgotten(self) -> None:
        log = WarningLog()
        log.lines(self.many(1000), 0.0)
        log.lines([], REPEAT_S)
        assert len(log.lines(self.many(1), REPEAT_S)) == 1
        assert repr(log) == "<WarningLog 1 said lately>"


def test_codes_are_words_fit_for_a_label() -> None:
    assert all(code.value.replace("_", "").isalpha() for code in WarningCode)


def test_a_password_in_an_older_relays_sentence_is_masked() -> None:
    fleet = Fleet()
    key = fleet.add("w0", warnings=("the engine's HTTP: http://user:secret@w0:8000/metrics",))
    (warning,) = fleet.core.fleet.warnings(fleet.view.sources[key], fleet.now_s)
    assert warning.sentence == "the engine's HTTP: http://***@w0:8000/metrics"
