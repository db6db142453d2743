"""Which workers may take a request: exclusions, silence, load samples."""

import pytest

from events.feed.stream import StreamState
from router.decide.core.core import DRAINED_MAX
from router.fleet.reservations.reservations import Ending
from router.request.refusal import Reason
from router.request.request import Role
from tests.router.decide.core.outcomes import excluded, refused
from tests.stage.fleet import Fleet, prompt


class TestEligibility:
    def test_labels_must_all_be_there(self, fleet: Fleet) -> None:
        fleet.add("a", labels={"zone": "north", "gpu": "h100"})
        fleet.add("b", labels={"zone": "south", "gpu": "h100"})
        fleet.add("c")
        wanted = {"zone": "south", "gpu": "h100"}
        assert excluded(fleet, prompt(8), required_labels=wanted) == {
            "a": "labels differ",
            "c": "labels differ",
        }
        assert fleet.picked(prompt(8), required_labels=wanted) == "b"

    def test_allowed_and_excluded_workers_are_honoured_and_exclusion_wins(self) -> None:
        fleet = Fleet("a", "b", "c")
        both = {"allowed_workers": frozenset("ab"), "excluded_workers": frozenset("a")}
        assert excluded(fleet, prompt(8), **both) == {
            "a": "excluded by the request",
            "c": "not among the allowed",
        }
        assert fleet.picked(prompt(8), **both) == "b"

    def test_an_excluded_engine_is_excluded_with_all_its_ranks(self, fleet: Fleet) -> None:
        for rank in range(2):
            fleet.add("a", rank)
        fleet.add("b")
        for _ in range(4):
            assert fleet.picked(prompt(8), excluded_workers=frozenset("a")) == "b"

    @pytest.mark.parametrize(
        ("role", "fit"),
        [
            (Role.BOTH, {"both"}),
            (Role.PREFILL, {"both", "prefill"}),
            (Role.DECODE, {"both", "decode"}),
        ],
    )
    def test_roles(self, role: Role, fit: set[str], fleet: Fleet) -> None:
        for name in ("both", "prefill", "decode"):
            fleet.add(name, role=name)
        unfit = excluded(fleet, prompt(8), role=role)
        assert unfit == {name: f"role is {name}" for name in {"both", "prefill", "decode"} - fit}

    def test_a_drained_worker_gets_nothing_new_until_it_is_undrained(self) -> None:
        fleet = Fleet("a", "b")
        assert fleet.core.drain("a") == 1
        assert {fleet.picked(prompt(8)) for _ in range(8)} == {"b"}
        assert fleet.core.undrain("a") == 1
        assert fleet.picked(prompt(8)) == "a", "now the idle one"

    def test_a_worker_is_drained_with_all_its_ranks_and_its_reservations_go_on(self) -> None:
        fleet = Fleet()
        for rank in range(3):
            fleet.add("a", rank)
        held = fleet.route(prompt(8)).reservation
        assert fleet.core.drain("a") == 3
        assert held.ended is None
        assert refused(fleet, prompt(8)).reason is Reason.NO_ELIGIBLE_WORKER

    def test_a_worker_may_be_drained_before_it_is_known(self, fleet: Fleet) -> None:
        assert fleet.core.drain("a") == 0
        fleet.add("a")
        assert excluded(fleet, prompt(8)) == {"a": "drained"}

    def test_at_the_bound_a_drained_worker_that_is_there_stays_drained(self) -> None:
        fleet = Fleet("a")
        fleet.core.drain("a")
        for i in range(DRAINED_MAX + 5):
            fleet.core.drain(f"gone-{i}")
        fleet.core.drain("a")  # again: takes nobody's place
        assert len(fleet.core.fleet.drained) == DRAINED_MAX
        assert "a" in fleet.core.fleet.drained
        assert "gone-0" not in fleet.core.fleet.drained
        assert f"gone-{DRAINED_MAX + 4}" in fleet.core.fleet.drained

    def test_prompt_and_expected_output_must_fit(self, fleet: Fleet) -> None:
        fleet.add("small", max_model_len=100)
        fleet.add("large", max_model_len=5000)
        fleet.add("unknown", max_model_len=0)
        assert excluded(fleet, prompt(99)) == {}  # and one token of output, by default
        assert excluded(fleet, prompt(100)) == {"small": "prompt too long"}
        assert excluded(fleet, prompt(100), expected_output_tokens=0) == {}
        assert excluded(fleet, prompt(50), expected_output_tokens=51) == {
            "small": "prompt too long"
        }

    def test_more_than_4096_tokens_of_output_are_not_believed(self, fleet: Fleet) -> None:
        fleet.add("w0", max_model_len=4100)
        assert excluded(fleet, prompt(4), expected_output_tokens=1 << 31) == {}
        assert excluded(fleet, prompt(5), expected_output_tokens=1 << 31) != {}

    def test_the_configured_output_counts_when_the_request_names_none(self) -> None:
        fleet = Fleet(expected_output_tokens=50)
        fleet.add("w0", max_model_len=100)
        assert excluded(fleet, prompt(50)) == {}
        assert excluded(fleet, prompt(51)) == {"w0": "prompt too long"}

    def test_a_worker_without_a_heartbeat_is_nobodys(self, fleet: Fleet) -> None:
        key = fleet.add("w0")
        fleet.view.sources[key].heartbeat = None
        assert refused(fleet, prompt(8)).reason is Reason.NO_WORKER

    def test_a_sleeping_engine_gets_nothing_until_it_wakes(self, fleet: Fleet) -> None:
        tired, well = fleet.add("tired"), fleet.add("well")
        fleet.say(tired, healthy=False, asleep=True)
        assert excluded(fleet, prompt(8)) == {"tired": "engine asleep"}
        assert {fleet.picked(prompt(8)) for _ in range(8)} == {well.worker_id}
        fleet.say(well, healthy=False, asleep=True)
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.NO_WORKER
        assert "engine asleep: 2" in str(refusal)
        fleet.say(tired, healthy=True, asleep=False)
        assert excluded(fleet, prompt(8)) == {"well": "engine asleep"}

    def test_an_unhealthy_heartbeat_takes_a_worker_out_at_once_and_a_healthy_one_back_in(
        self, fleet: Fleet
    ) -> None:
        sick, well = fleet.add("sick"), fleet.add("well")
        fleet.say(sick, healthy=False)
        assert excluded(fleet, prompt(8)) == {"sick": "engine not answering"}
        assert {fleet.picked(prompt(8)) for _ in range(8)} == {well.worker_id}
        fleet.say(sick, healthy=True)
        assert excluded(fleet, prompt(8)) == {}


class TestSilence:
    def test_a_worker_whose_beats_stop_is_never_picked_again_once_its_time_is_up(self) -> None:
        fleet = Fleet(policy="dynamo-unguarded")
        asked = prompt(100)
        stops = fleet.add("stops", total_slots=None)
        goes_on = fleet.add("goes-on", total_slots=None)
        fleet.cache(stops, asked)  # by far the better one
        fleet.turn(10)
        assert fleet.picked(asked) == "stops"
        last_beat_s = fleet.now_s
        held = fleet.route(asked).reservation
        while fleet.now_s < last_beat_s + 40:
            fleet.turn(0.25, silent=[stops])
            quiet_s = fleet.now_s - last_beat_s
            if quiet_s < 2:
                assert fleet.picked(asked) == "stops"
            elif quiet_s >= 3:  # between the two it is suspect: it may be picked, by its load
                assert fleet.picked(asked) == "goes-on"
            assert (stops in fleet.view.sources) == (quiet_s < 30)
            assert (held.ended is Ending.WORKER_LOST) == (quiet_s >= 30)
        assert stops not in fleet.core.fleet.loads
        assert set(fleet.loads()) == {goes_on}

    def test_one_that_beats_again_before_it_is_forgotten_is_back_with_all_it_holds(self) -> None:
        fleet = Fleet()
        asked = prompt(100)
        stops, _ = fleet.add("stops"), fleet.add("goes-on")
        fleet.cache(stops, asked)
        fleet.turn(20, silent=[stops])
        assert fleet.picked(asked) == "goes-on"
        fleet.turn(1)
        assert fleet.picked(asked) == "stops"

    def test_when_most_go_silent_at_once_they_are_routed_to_by_load(self, fleet: Fleet) -> None:
        asked = prompt(100)
        keys = [fleet.add(f"w{i}") for i in range(6)]
        fleet.cache(keys[0], asked)
        fleet.turn(5, silent=keys)
        decision = fleet.decide(asked)
        assert len(decision.rows) == 6
        assert decision.rows.trust.tolist() == [0] * 6

    def test_those_that_beat_come_before_the_silent_though_most_are_silent_at_once(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}") for i in range(8)]
        for key in keys[5:]:
            fleet.say(key, running=8, used_blocks=100.0)
        for quiet_s in (5, 10, 25):
            fleet.turn(quiet_s, silent=keys[:5])
            assert fleet.view.mass_silence
            picks = [fleet.route(prompt(100)).reservation for _ in range(40)]
            assert {one.worker for one in picks} <= set(keys[5:])
            for one in picks:
                fleet.report(one, "finished")
        assert set(fleet.view.sources) == set(keys), "nobody is forgotten early"

    def test_those_that_beat_and_are_full_are_waited_for(self, fleet: Fleet) -> None:
        keys = [fleet.add(f"w{i}", total_slots=2) for i in range(6)]
        fleet.turn(5, silent=keys[:4])
        for key in keys[4:]:
            fleet.say(key, running=2)
        assert refused(fleet, prompt(100)).reason is Reason.ALL_WORKERS_FULL

    def test_the_silent_are_tried_for_what_none_that_beats_may_take(self, fleet: Fleet) -> None:
        keys = [fleet.add(f"w{i}", labels={"zone": "ab"[i < 4]}) for i in range(6)]
        fleet.turn(5, silent=keys[:4])
        pick = fleet.route(prompt(100), required_labels={"zone": "b"})
        assert pick.reservation.worker in keys[:4]
        decision = fleet.decide(prompt(100))
        assert [source.key for source in decision.sources] == keys[4:]
        for key in keys[4:]:
            fleet.core.drain(key.worker_id)
        assert fleet.route(prompt(100)).reservation.worker in keys[:4]
        fleet.core.undrain(keys[4].worker_id)
        assert fleet.route(prompt(100)).reservation.worker == keys[4]

    def test_silence_of_a_minority_is_no_last_resort(self, fleet: Fleet) -> None:
        keys = [fleet.add(f"w{i}", labels={"zone": "ab"[i < 2]}) for i in range(6)]
        fleet.turn(5, silent=keys[:2])
        refusal = refused(fleet, prompt(100), required_labels={"zone": "b"})
        assert refusal.reason is Reason.NO_ELIGIBLE_WORKER

    def test_of_a_pair_each_half_prefers_those_that_beat(self, fleet: Fleet) -> None:
        about = {"kv_connector": "NixlConnector", "kv_engine_id": "e"}
        keys = [fleet.add(f"p{i}", role="prefill", **about) for i in range(3)]
        decodes = [fleet.add(f"d{i}", role="decode", **about) for i in range(2)]
        for key in keys + decodes:
            fleet.say(key, engine="sglang", bootstrap_port=1)
        fleet.turn(5, silent=[*keys, decodes[0]])
        assert fleet.view.mass_silence
        found = fleet.route(prompt(4000), role=Role.PAIR).reservation
        assert found.worker == decodes[1]
        assert found.prefill is not None
        assert found.prefill.worker in keys

    def test_a_worker_whose_heartbeats_cant_be_read_comes_last(self, fleet: Fleet) -> None:
        told, untold = fleet.add("told"), fleet.add("untold")
        fleet.cache(untold, prompt(100))
        for _ in range(4):
            fleet.turn(1, silent=[untold])
            fleet.beat(untold)
            assert fleet.view.on_heartbeat(untold, b"\xc1", fleet.now_s) is None
            fleet.tick()
        source = fleet.view.sources[untold]
        assert source.stream.state is StreamState.LIVE
        assert fleet.core.fleet.excluded(source) == "no readable heartbeat"
        assert [one.code for one in fleet.core.fleet.warnings(source, fleet.now_s)] == [
            "no_heartbeat"
        ]
        assert {fleet.picked(prompt(100)) for _ in range(4)} == {"told"}
        fleet.core.drain(told.worker_id)
        assert fleet.picked(prompt(100)) == "untold", "the last resort"
        assert fleet.core.fleet.excluded(source) == ""
        fleet.say(untold)
        assert fleet.core.fleet.warnings(source, fleet.now_s) == []
        assert not fleet.core.fleet.last_resort(source)

    def test_a_removed_worker_ends_its_reservations_and_stays_away(self, fleet: Fleet) -> None:
        key = fleet.add("w0")
        held = fleet.route(prompt(100)).reservation
        assert fleet.core.remove("w0", 0.0, fleet.now_s) == 1
        assert held.ended is Ending.WORKER_LOST
        assert (fleet.loads(), fleet.core.fleet.loads, len(fleet.core.reservations)) == ({}, {}, 0)
        fleet.now_s += 59
        fleet.say(key)
        assert key not in fleet.view.sources, "the configured tombstone is 60 s"
        fleet.now_s += 2
        fleet.tick()
        fleet.say(key)
        assert key in fleet.view.sources

    def test_losing_one_rank_leaves_the_others_reservations(self) -> None:
        fleet = Fleet(policy="round-robin")
        lost, kept = fleet.add("a", 0), fleet.add("a", 1)
        held = [fleet.route(prompt(20)).reservation for _ in range(4)]
        fleet.turn(31, silent=[lost])
        assert {one.worker for one in held if one.ended is None} == {kept}
        assert fleet.loads() == {kept: (2, 1 + 2, 20 + 4)}, (
            "a shared block, computed once; two tails"
        )


class TestLoadSamples:
    def test_the_age_of_a_sample_is_by_the_relays_clock_alone(self, fleet: Fleet) -> None:
        key = fleet.add("w0")
        fleet.turn(1)
        fleet.now_s += 1
        fleet.route(prompt(8))
        fleet.now_s += 1
        # The relay's clock is an hour ahead; the sample is 1.5 s old: from before our request.
        ahead_s = fleet.now_s + 3600
        fleet.say(key, running=4, sampled_at_s=ahead_s - 1.5, sent_at_s=ahead_s)
        load = fleet.core.fleet.load_of(key)
        assert load.active_requests() == 5
        # Half a second old: it has seen our request.
        fleet.say(key, running=4, sampled_at_s=ahead_s - 0.5, sent_at_s=ahead_s)
        assert load.active_requests() == 4

    def test_a_heartbeat_without_a_sample_changes_no_load(self, fleet: Fleet) -> None:
        key = fleet.add("w0", sampled_at_s=None, running=9)
        assert fleet.core.fleet.load_of(key).running == 0
        assert fleet.core.fleet.load_of(key).sampled_at_s is None
