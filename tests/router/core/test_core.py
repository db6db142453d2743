"""The decision core, with a real view and index behind it and a clock that the test turns."""

from collections import Counter
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from events.feed.stream import StreamState
from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import Tier, WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.config.configurations import ModelSettings
from router.config.routing_settings import GuardSettings
from router.core.core import DRAINED_MAX
from router.core.progress import Progress, ProgressResult, ProgressState, Repeated
from router.decision.decision import Decision, Overlap
from router.fleet.eligibility import LORA_ELSEWHERE
from router.fleet.models import MODELS_MAX
from router.fleet.pools import _POOLS_MAX
from router.policies import POLICIES
from router.policies.candidates import Candidates
from router.policies.policy import Parameters, Policy, Scores
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal
from router.request.request import Role
from router.reservations.reservations import FORGOTTEN_SLICE, RESERVATION_UNITS, SLICE_UNITS, Ending
from tests.stage.fleet import Fleet, prompt

UNGUARDED = GuardSettings(enabled=False)
"""So that a worker with a request in front keeps what is cheapest there."""


def overlaps(decision: Decision) -> list[Overlap]:
    return [decision.overlap(row) for row in range(len(decision.rows))]


def decide(fleet: Fleet, asked: Prompt, **about: Any) -> Decision:
    return fleet.core.decide(fleet.request(asked, **about), fleet.now_s)


def overlap(fleet: Fleet, asked: Prompt) -> Overlap:
    """Of the only worker."""
    (told,) = overlaps(decide(fleet, asked))
    return told


def overlap_of(fleet: Fleet, asked: Prompt, key: WorkerKey) -> Overlap:
    """Of one worker among several."""
    decision = decide(fleet, asked, model="m")
    return decision.overlap(decision.rows.workers.index(key))


def refused(fleet: Fleet, asked: Prompt, **about: Any) -> Refusal:
    """Why a request gets no worker; asserts that this changed nothing."""
    before = snapshot(fleet)
    with pytest.raises(Refusal) as caught:
        fleet.core.route(fleet.request(asked, **about), fleet.now_s)
    assert snapshot(fleet) == before, "a refusal changes nothing"
    return caught.value


def excluded(fleet: Fleet, asked: Prompt, **about: Any) -> dict[str, str]:
    """Worker -> why it can't be picked; those that can are left out."""
    decision = decide(fleet, asked, **about)
    rows = zip(decision.rows.workers, decision.excluded, strict=True)
    not_live = ((source.key, reason) for source, reason in decision.not_live)
    return {key.worker_id: reason for key, reason in (*rows, *not_live) if reason}


def snapshot(fleet: Fleet) -> object:
    core = fleet.core
    return fleet.loads(), repr(core.reservations), core.endings.total(), dict(core.fleet.drained)


def report(fleet: Fleet, reservation_id: str, state: str, **told: Any) -> ProgressResult:
    return fleet.core.report(Progress(reservation_id, ProgressState(state), **told), fleet.now_s)


class TestOverlap:
    def test_a_request_goes_where_its_prefix_is(self) -> None:
        fleet = Fleet()
        for i in range(4):
            fleet.add(f"w{i}")
        asked = prompt(100)
        fleet.cache(WorkerKey("w2", 0), asked)
        pick = fleet.route(asked)
        assert pick.reservation.worker == ("w2", 0)
        assert pick.reservation.predicted_tokens == 96
        assert pick.reservation.new_tokens == 4

    def test_overlap_is_told_by_the_fastest_tier_that_holds_each_block(self) -> None:
        fleet = Fleet()
        key, asked = fleet.add("w0"), prompt(100)
        fleet.cache(key, asked, 32, Tier.DEVICE)
        fleet.cache(key, asked, 64, Tier.HOST)
        fleet.cache(key, asked, 80, Tier.DISK)
        assert overlap(fleet, asked) == Overlap(80, 80, 32, 32, 16, 0)

    def test_a_fully_cached_prompt_has_its_last_block_computed_again(self) -> None:
        fleet = Fleet()
        key, asked = fleet.add("w0"), prompt(64)
        fleet.cache(key, asked, 48, Tier.DEVICE)
        fleet.cache(key, asked, 64, Tier.HOST)
        # (64 - 1) // 16 = 3 blocks; the fourth, on the host, is there and of no use
        assert overlap(fleet, asked) == Overlap(64, 48, 48, 0, 0, 0)

    @pytest.mark.parametrize(
        ("tokens", "usable"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (63, 48), (65, 64)]
    )
    def test_usable_overlap_is_capped_one_token_before_the_end(
        self, tokens: int, usable: int
    ) -> None:
        fleet = Fleet()
        fleet.cache(fleet.add("w0"), prompt(1000))
        told = overlap(fleet, prompt(tokens))
        assert told.usable == usable == (tokens - 1) // 16 * 16
        assert told.raw == tokens // 16 * 16

    def test_overlap_never_crosses_a_hole(self) -> None:
        fleet = Fleet()
        key, asked = fleet.add("w0"), prompt(100)
        hashes = asked.prefixes(16)
        fleet.store(key, hashes[[0, 1, 3, 4]])
        assert overlap(fleet, asked).raw == 32

    def test_what_is_removed_or_cleared_overlaps_no_more(self) -> None:
        fleet = Fleet()
        key, asked = fleet.add("w0"), prompt(100)
        fleet.cache(key, asked)
        fleet.remove(key, asked.prefixes(16)[4:])
        assert overlap(fleet, asked).usable == 64
        fleet.clear(key)
        assert overlap(fleet, asked).usable == 0

    def test_pools_of_different_block_sizes_are_compared_in_tokens(self) -> None:
        fleet = Fleet()
        asked = prompt(200)
        fine, coarse = fleet.add("fine", block_size=16), fleet.add("coarse", block_size=64)
        fleet.cache(fine, asked, 112)
        fleet.cache(coarse, asked, 128)
        decision = decide(fleet, asked)
        assert {
            key.worker_id: told.usable
            for key, told in zip(decision.rows.workers, overlaps(decision), strict=True)
        } == {"fine": 112, "coarse": 128}
        assert fleet.picked(asked) == "coarse"

    def test_each_size_has_its_own_cap(self) -> None:
        fleet = Fleet()
        asked = prompt(128)
        fleet.cache(fleet.add("fine", block_size=16), asked)
        fleet.cache(fleet.add("coarse", block_size=64), asked)
        decision = decide(fleet, asked)
        assert [told.usable for told in overlaps(decision)] == [112, 64]
        assert [told.raw for told in overlaps(decision)] == [128, 128]

    def test_a_worker_that_has_not_told_its_block_size_overlaps_nothing(self) -> None:
        fleet = Fleet()
        fleet.add("w0", block_size=0)
        assert overlap(fleet, prompt(100)) == Overlap(0, 0, 0, 0, 0, 0)
        assert fleet.picked(prompt(100)) == "w0"

    def test_a_callers_hashes_find_the_workers_of_their_size_only(self) -> None:
        fleet = Fleet()
        tokens = pack_tokens(range(100))
        hashed = Prompt.from_hashes(block_hashes(tokens, 16), 16, 100)
        fleet.cache(fleet.add("same", block_size=16), prompt(100))
        fleet.cache(fleet.add("other", block_size=32), prompt(100))
        assert excluded(fleet, hashed) == {"other": "block size differs"}
        pick = fleet.route(hashed)
        assert pick.reservation.worker.worker_id == "same"
        assert pick.reservation.predicted_tokens == 96


class TestTrust:
    def test_a_recovering_streams_overlap_counts_half(self) -> None:
        fleet = Fleet()
        asked = prompt(65)
        whole, broken = fleet.add("whole"), fleet.add("broken")
        fleet.cache(whole, asked, 48)
        fleet.cache(broken, asked, 64)
        assert fleet.picked(asked) == "broken"
        fleet.tell(broken, lost=True)
        fleet.beat(broken)
        assert fleet.view.sources[broken].stream.state is StreamState.RECOVERING
        assert decide(fleet, asked).rows.overlap_tokens.tolist() == [48, 32]
        assert fleet.picked(asked) == "whole"

    def test_while_our_connection_is_down_nobodys_overlap_counts_and_all_are_routed_to(
        self,
    ) -> None:
        fleet = Fleet()
        asked = prompt(65)
        for i in range(2):
            fleet.cache(fleet.add(f"w{i}"), asked, 64 * i)
        fleet.view.on_connection(False, fleet.now_s)
        decision = decide(fleet, asked)
        assert decision.rows.trust.tolist() == [0, 0]
        assert decision.rows.overlap_tokens.tolist() == [0, 0]
        assert decision.tied == 2, "routing goes by load"
        assert [told.usable for told in overlaps(decision)] == [0, 64], "what is known is told"

    def test_a_new_epoch_forgets_what_the_worker_held(self) -> None:
        fleet = Fleet()
        key, asked = fleet.add("w0"), prompt(65)
        fleet.cache(key, asked)
        fleet.now_s += 1
        fleet.add("w0")  # another life
        assert overlap(fleet, asked).raw == 0


class TestEligibility:
    def test_labels_must_all_be_there(self) -> None:
        fleet = Fleet()
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
        fleet = Fleet()
        for name in "abc":
            fleet.add(name)
        both = {
            "allowed_workers": frozenset("ab"),
            "excluded_workers": frozenset("a"),
        }
        assert excluded(fleet, prompt(8), **both) == {
            "a": "excluded by the request",
            "c": "not among the allowed",
        }
        assert fleet.picked(prompt(8), **both) == "b"

    def test_an_excluded_engine_is_excluded_with_all_its_ranks(self) -> None:
        fleet = Fleet()
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
    def test_roles(self, role: Role, fit: set[str]) -> None:
        fleet = Fleet()
        for name in ("both", "prefill", "decode"):
            fleet.add(name, role=name)
        unfit = excluded(fleet, prompt(8), role=role)
        assert unfit == {name: f"role is {name}" for name in {"both", "prefill", "decode"} - fit}

    def test_a_drained_worker_gets_nothing_new_until_it_is_undrained(self) -> None:
        fleet = Fleet()
        for name in "ab":
            fleet.add(name)
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

    def test_a_worker_may_be_drained_before_it_is_known(self) -> None:
        fleet = Fleet()
        assert fleet.core.drain("a") == 0
        fleet.add("a")
        assert excluded(fleet, prompt(8)) == {"a": "drained"}

    def test_at_the_bound_a_drained_worker_that_is_there_stays_drained(self) -> None:
        fleet = Fleet()
        fleet.add("a")
        fleet.core.drain("a")
        for i in range(DRAINED_MAX + 5):
            fleet.core.drain(f"gone-{i}")
        fleet.core.drain("a")  # again: takes nobody's place
        assert len(fleet.core.fleet.drained) == DRAINED_MAX
        assert "a" in fleet.core.fleet.drained
        assert "gone-0" not in fleet.core.fleet.drained
        assert f"gone-{DRAINED_MAX + 4}" in fleet.core.fleet.drained

    def test_prompt_and_expected_output_must_fit(self) -> None:
        fleet = Fleet()
        fleet.add("small", max_model_len=100)
        fleet.add("large", max_model_len=5000)
        fleet.add("unknown", max_model_len=0)
        assert excluded(fleet, prompt(99)) == {}  # and one token of output, by default
        assert excluded(fleet, prompt(100)) == {"small": "prompt too long"}
        assert excluded(fleet, prompt(100), expected_output_tokens=0) == {}
        assert excluded(fleet, prompt(50), expected_output_tokens=51) == {
            "small": "prompt too long"
        }

    def test_more_than_4096_tokens_of_output_are_not_believed(self) -> None:
        fleet = Fleet()
        fleet.add("w0", max_model_len=4100)
        assert excluded(fleet, prompt(4), expected_output_tokens=1 << 31) == {}
        assert excluded(fleet, prompt(5), expected_output_tokens=1 << 31) != {}

    def test_the_configured_output_counts_when_the_request_names_none(self) -> None:
        fleet = Fleet(expected_output_tokens=50)
        fleet.add("w0", max_model_len=100)
        assert excluded(fleet, prompt(50)) == {}
        assert excluded(fleet, prompt(51)) == {"w0": "prompt too long"}

    def test_a_worker_without_a_heartbeat_is_nobodys(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        fleet.view.sources[key].heartbeat = None
        assert refused(fleet, prompt(8)).reason is Reason.NO_WORKER

    def test_an_unhealthy_heartbeat_takes_a_worker_out_at_once_and_a_healthy_one_back_in(
        self,
    ) -> None:
        fleet = Fleet()
        sick, well = fleet.add("sick"), fleet.add("well")
        fleet.say(sick, healthy=False)
        assert excluded(fleet, prompt(8)) == {"sick": "engine not answering"}
        assert {fleet.picked(prompt(8)) for _ in range(8)} == {well.worker_id}
        fleet.say(sick, healthy=True)
        assert excluded(fleet, prompt(8)) == {}


class TestModels:
    def test_a_request_goes_to_workers_of_its_model(self) -> None:
        fleet = Fleet()
        fleet.add("a", model="alpha")
        fleet.add("b", model="beta", model_aliases=("b",))
        for _ in range(4):
            assert fleet.picked(prompt(8), model="alpha") == "a"
            assert fleet.picked(prompt(8), model="beta") == "b"
            assert fleet.picked(prompt(8), model="b") == "b"

    def test_a_fleet_of_one_model_needs_no_name(self) -> None:
        fleet = Fleet()
        fleet.add("a", model="alpha")
        assert fleet.picked(prompt(8)) == "a"

    def test_a_fleet_of_several_models_does(self) -> None:
        fleet = Fleet()
        fleet.add("a", model="alpha")
        fleet.add("b", model="beta")
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.MODEL_REQUIRED
        assert refusal.message == (
            "this fleet serves 2 models, so the request must name one: alpha, beta"
        )

    def test_a_worker_that_has_not_told_its_model_makes_no_second_one(self) -> None:
        fleet = Fleet()
        fleet.add("a", model="alpha")
        fleet.add("new", model="")
        for _ in range(4):
            assert fleet.picked(prompt(8)) == "a"

    def test_a_fleet_that_tells_no_model_at_all_serves_requests_that_name_none(self) -> None:
        fleet = Fleet()
        fleet.add("a", model="")
        assert fleet.picked(prompt(8)) == "a"

    @pytest.mark.parametrize("asked_for", ["llama", "meta/llama", "default"])
    @pytest.mark.parametrize("served_as", ["llama", "meta/llama"])
    def test_all_names_of_a_configured_model_mean_it(self, asked_for: str, served_as: str) -> None:
        fleet = Fleet(models=(ModelSettings(name="llama", aliases=("meta/llama", "default")),))
        fleet.add("a", model=served_as)
        fleet.add("b", model="other")
        assert fleet.picked(prompt(8), model=asked_for) == "a"

    def test_names_of_one_model_are_one_model(self) -> None:
        fleet = Fleet(models=(ModelSettings(name="llama", aliases=("meta/llama",)),))
        fleet.add("a", model="llama")
        fleet.add("b", model="meta/llama")
        assert {fleet.picked(prompt(8)) for _ in range(8)} == {"a", "b"}

    def test_a_lora_is_a_model_and_salts_the_prompt(self) -> None:
        fleet = Fleet()
        base, tuned = fleet.add("base"), fleet.add("tuned", lora_names=("ad", "bc"))
        with_lora = prompt(100, lora_name="ad")
        fleet.cache(base, prompt(100))
        fleet.cache(tuned, with_lora, 48)
        assert fleet.core.fleet.lora_of("ad") == "ad"
        assert fleet.core.fleet.lora_of("m") == ""
        pick = fleet.route(with_lora, model="ad")
        assert pick.reservation.worker == tuned
        assert pick.reservation.predicted_tokens == 48

    def test_an_alias_of_a_lora_means_the_lora(self) -> None:
        fleet = Fleet(models=(ModelSettings(name="tuned", aliases=("ad", "alias")),))
        fleet.add("a", lora_names=("ad",))
        assert fleet.core.fleet.lora_of("alias") == fleet.core.fleet.lora_of("tuned") == "ad"

    def test_a_named_lora_goes_where_it_is_loaded_or_may_be(self) -> None:
        fleet = Fleet()
        fleet.add("has", lora_names=("ad",))
        fleet.add("has-not", lora_names=("bc",))
        fleet.add("loads-any")
        assert excluded(fleet, prompt(8, lora_name="ad"), model="m") == {
            "has-not": "LoRA not loaded"
        }

    def test_a_lora_that_is_loaded_nowhere_goes_where_it_may_be_loaded(self) -> None:
        fleet = Fleet()
        fleet.add("fixed", lora_names=("bc",))
        loads = fleet.add("loads", lora_names=("bc",), loads_loras=True)
        with_lora = prompt(100, lora_name="new")
        assert excluded(fleet, with_lora, model="m") == {"fixed": "LoRA not loaded"}
        pick = fleet.route(with_lora, model="m")
        assert pick.reservation.worker == loads
        assert overlap_of(fleet, with_lora, loads).predicted == 96, "under the LoRA's hash"
        assert overlap_of(fleet, prompt(100), loads).predicted == 0

    def test_no_worker_has_to_load_a_lora_while_another_that_has_it_has_room(self) -> None:
        fleet = Fleet()
        has = fleet.add("has", lora_names=("ad",), loads_loras=True)
        fleet.add("loads", lora_names=("bc",), loads_loras=True)
        of = prompt(8, lora_name="ad")
        assert excluded(fleet, of, model="m") == {"loads": LORA_ELSEWHERE}
        fleet.say(has, running=100)
        assert excluded(fleet, of, model="m") == {"has": "full"}
        fleet.say(has, running=0)
        fleet.core.drain("has")
        assert excluded(fleet, of, model="m") == {"has": "drained"}

    def test_a_name_that_nobody_serves_is_a_lora_where_one_model_loads_on_demand(self) -> None:
        fleet = Fleet(models=(ModelSettings(name="away"), ModelSettings(name="m", aliases=("n",))))
        loads = fleet.add("loads", loads_loras=True, lora_names=("bc",))
        fleet.add("alias", model="n", loads_loras=True)
        other = fleet.add("other", model="other")
        core = fleet.core
        core.fleet.pools.refresh()
        names = ("new", "m", "n", "other", "bc", "away", "")
        assert [core.fleet.lora_of(name) for name in names] == ["new", "", "", "", "bc", "", ""]
        pick = fleet.route(prompt(8, lora_name="new"), model="new", excluded_workers={"alias"})
        assert pick.reservation.worker == loads
        assert refused(fleet, prompt(8), model="away").reason is Reason.NO_WORKER
        fleet.say(other, loads_loras=True)
        refusal = refused(fleet, prompt(8), model="unheard")
        assert refusal.reason is Reason.UNKNOWN_MODEL
        assert refusal.message.endswith("is named beside its model (lora_name)")

    def test_a_lora_that_was_evicted_is_loaded_once_more_and_a_model_that_is_gone_is_not(
        self,
    ) -> None:
        fleet = Fleet()
        loads = fleet.add("loads", loads_loras=True, lora_names=("ad",))
        gone = fleet.add("gone", model="alpha")
        fleet.say(loads, lora_names=())
        fleet.core.remove(gone.worker_id, 3600.0, fleet.now_s)
        fleet.core.fleet.pools.refresh()
        assert fleet.core.fleet.lora_of("ad") == "ad"
        assert fleet.picked(prompt(8, lora_name="ad"), model="ad") == "loads"
        assert refused(fleet, prompt(8), model="alpha").reason is Reason.NO_WORKER
        fleet.core.fleet.ready = False
        assert refused(fleet, prompt(8), model="unheard").reason is Reason.NO_WORKER

    def test_names_of_loras_to_be_loaded_are_kept_up_to_a_bound(self) -> None:
        fleet = Fleet(index=NativeIndex())
        fleet.add("loads", loads_loras=True)
        lane = fleet.core.lane
        assert lane is not None
        for i in range(_POOLS_MAX + 10):
            plain = router_pb2.RouteRequest(model=f"lora-{i}", token_bytes=bytes(400))
            assert lane.answer(plain.SerializeToString(), fleet.now_s) is None, "not plain"
            assert len(fleet.core.fleet.pools._pools) <= _POOLS_MAX

    def test_serves_says_for_lists_what_pools_are_made_of(self) -> None:
        fleet = Fleet(models=(ModelSettings(name="llama", aliases=("alias",)),))
        key = fleet.add("a", model="llama", model_aliases=("l",), lora_names=("ad",))
        source = fleet.view.sources[key]
        assert all(fleet.core.fleet.serves(source, name) for name in ("llama", "alias", "l", "ad"))
        assert not fleet.core.fleet.serves(source, "other")
        source.heartbeat = None
        assert not fleet.core.fleet.serves(source, "llama")


class TestNobody:
    def test_before_any_worker_is_heard_of_it_is_too_early_to_tell(self) -> None:
        refusal = refused(Fleet(), prompt(8), model="any")
        assert refusal.reason is Reason.NO_WORKER
        assert refusal.message == "no worker is known yet"

    def test_a_worker_that_beats_and_has_not_said_what_it_serves_may_serve_it(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        fleet.core.remove("w0", 0.001, fleet.now_s)
        fleet.now_s += 400
        fleet.core.tick(fleet.now_s)  # forgets model names
        fleet.beat(key)
        assert fleet.view.sources[key].heartbeat is None
        refusal = refused(fleet, prompt(8), model="m")
        assert refusal.reason is Reason.NO_WORKER
        assert "has named its model" in refusal.message

    def test_a_model_that_nobody_ever_served_is_unknown(self) -> None:
        fleet = Fleet()
        fleet.add("w0", model="alpha")
        refusal = refused(fleet, prompt(8), model="gpt")
        assert refusal.reason is Reason.UNKNOWN_MODEL
        assert refusal.message == "unknown model 'gpt'; served here: alpha"

    def test_before_the_router_is_ready_no_model_is_unknown(self) -> None:
        fleet = Fleet()
        fleet.core.fleet.ready = False
        assert refused(fleet, prompt(8), model="gpt").reason is Reason.NO_WORKER
        fleet.add("w0", model="alpha")
        refusal = refused(fleet, prompt(8), model="gpt")
        assert refusal.reason is Reason.NO_WORKER
        assert refusal.message == (
            "no worker known so far serves 'gpt'; the router has just started"
        )
        assert fleet.picked(prompt(8), model="alpha") == "w0", "those that are there are served"
        fleet.core.fleet.ready = True
        assert refused(fleet, prompt(8), model="gpt").reason is Reason.UNKNOWN_MODEL

    def test_a_configured_model_is_known_before_any_worker_serves_it(self) -> None:
        fleet = Fleet(models=(ModelSettings(name="llama", aliases=("l",)),))
        fleet.add("w0", model="alpha")
        for name in ("llama", "l"):
            refusal = refused(fleet, prompt(8), model=name)
            assert refusal.reason is Reason.NO_WORKER
            assert refusal.message == f"no worker serves '{name}' at the moment"

    def test_a_model_whose_workers_went_is_known_for_300_seconds(self) -> None:
        fleet = Fleet()
        gone = fleet.add("gone", model="alpha", model_aliases=("a",), lora_names=("ad",))
        fleet.add("stays", model="beta")
        fleet.core.remove(gone.worker_id, 3600.0, fleet.now_s)
        fleet.turn(299)
        for name in ("alpha", "a", "ad"):
            assert refused(fleet, prompt(8), model=name).reason is Reason.NO_WORKER
        fleet.turn(2)
        for name in ("alpha", "a", "ad"):
            assert refused(fleet, prompt(8), model=name).reason is Reason.UNKNOWN_MODEL

    def test_a_model_is_known_for_as_long_when_nobody_at_all_is_left(self) -> None:
        fleet = Fleet()
        fleet.add("gone", model="alpha")
        fleet.core.remove("gone", 3600.0, fleet.now_s)
        fleet.turn(299)
        refusal = refused(fleet, prompt(8), model="alpha")
        assert refusal.message == "no worker serves 'alpha' at the moment"

    def test_model_names_are_remembered_up_to_a_bound(self) -> None:
        fleet = Fleet()
        for i in range(MODELS_MAX // 1000 + 1):
            fleet.add(f"w{i}", lora_names=tuple(f"lora-{i}-{n}" for n in range(1000)))
        assert len(fleet.core.fleet.models.seen) == MODELS_MAX

    def test_when_all_of_a_pool_are_silent_nobody_is_live(self) -> None:
        fleet = Fleet()
        silent = fleet.add("silent", model="alpha")
        fleet.add("other", model="beta")
        fleet.turn(5, silent=[silent])
        refusal = refused(fleet, prompt(8), model="alpha")
        assert refusal.reason is Reason.NO_WORKER
        assert refusal.message == "no live worker for 'alpha': 1 silent"

    def test_a_decision_without_live_workers_still_says_who_is_there(self) -> None:
        fleet = Fleet()
        sick = fleet.add("sick")
        fleet.say(sick, healthy=False)
        decision = decide(fleet, prompt(8))
        assert (len(decision.rows), decision.order) == (0, [])
        assert [(source.key, why) for source, why in decision.not_live] == [
            (sick, "engine not answering")
        ]
        assert decision.exclusions() == {"engine not answering": 1}


class TestFull:
    def test_a_full_worker_is_skipped(self) -> None:
        fleet = Fleet(policy="dynamo-logit")
        full, free = fleet.add("full", total_slots=2), fleet.add("free")
        asked = prompt(100)
        fleet.cache(full, asked)
        fleet.say(full, running=2)
        assert excluded(fleet, asked) == {"full": "full"}
        assert fleet.picked(asked) == free.worker_id

    def test_our_own_reservations_fill_a_worker_up(self) -> None:
        fleet = Fleet()
        fleet.add("w0", total_slots=3)
        for _ in range(3):
            fleet.route(prompt(8))
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.ALL_WORKERS_FULL
        assert refusal.retry_after_s == 0.5
        assert refusal.message == "no worker has room: 1 full"

    def test_blocks_fill_a_worker_up_too_shared_ones_once(self) -> None:
        fleet = Fleet()
        fleet.add("w0", total_blocks=5, total_slots=None)
        asked = prompt(64)  # 4 blocks
        for _ in range(10):
            fleet.route(asked)
        fleet.route(prompt(16, first=1000))
        assert refused(fleet, asked).reason is Reason.ALL_WORKERS_FULL

    def test_room_comes_back_with_a_report(self) -> None:
        fleet = Fleet()
        fleet.add("w0", total_slots=1)
        held = fleet.route(prompt(8)).reservation
        assert refused(fleet, prompt(8)).reason is Reason.ALL_WORKERS_FULL
        report(fleet, held.id, "finished")
        assert fleet.picked(prompt(8)) == "w0"

    def test_an_unknown_total_is_never_full(self) -> None:
        fleet = Fleet()
        fleet.add("w0", total_blocks=None, total_slots=None)
        fleet.say(WorkerKey("w0", 0), running=10**6, used_blocks=1e8)
        assert fleet.picked(prompt(8)) == "w0"

    def test_some_full_and_the_others_not_eligible_is_full(self) -> None:
        fleet = Fleet()
        fleet.say(fleet.add("full", total_slots=1), running=1)
        fleet.add("other")
        fleet.core.drain("other")
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.ALL_WORKERS_FULL
        assert refusal.message == "no worker has room: 1 drained, 1 full"

    def test_over_reservations_max_requests_are_shed_before_any_work(self) -> None:
        fleet = Fleet(reservations_max=2)
        fleet.add("w0")
        fleet.route(prompt(8))
        held = fleet.route(prompt(8)).reservation
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.TOO_MANY_RESERVATIONS
        assert refusal.retry_after_s == 0.5
        assert "routing.reservations_max" in refusal.message
        report(fleet, held.id, "finished")
        fleet.route(prompt(8))

    def test_a_cost_that_is_no_number_never_wins(self) -> None:
        costs = {"a": nan, "b": 3.0, "c": -np.inf, "d": 2.0, "e": np.inf}

        def score(rows: Candidates, _: Parameters) -> Scores:
            return Scores(np.array([costs[key.worker_id] for key in rows.workers]))

        fleet = Fleet()
        fleet.core.policies["broken"] = Policy("broken", "", "", Parameters(), score)
        for name in costs:
            fleet.add(name)
        assert fleet.picked(prompt(8), policy="broken") == "d"
        assert excluded(fleet, prompt(8), policy="broken") == dict.fromkeys(
            "ace", "cost is not a number"
        )
        costs.update(b=nan, d=nan)
        assert refused(fleet, prompt(8), policy="broken").reason is Reason.NO_ELIGIBLE_WORKER


class TestTooLong:
    def test_over_the_configured_limit_nothing_is_even_hashed(self) -> None:
        fleet = Fleet(prompt_tokens_max=100)
        fleet.add("w0")
        asked = prompt(101)
        refusal = refused(fleet, asked)
        assert refusal.reason is Reason.PROMPT_TOO_LONG
        assert refusal.message == (
            "the prompt has 101 tokens, the limit is 100 (routing.prompt_tokens_max)"
        )
        assert asked._prefixes == {}
        assert fleet.picked(prompt(100)) == "w0"

    def test_too_long_for_all_is_the_callers_mistake(self) -> None:
        fleet = Fleet()
        fleet.add("a", max_model_len=100)
        fleet.add("b", max_model_len=200)
        refusal = refused(fleet, prompt(300))
        assert refusal.reason is Reason.PROMPT_TOO_LONG
        assert refusal.message == (
            "the prompt has 300 tokens and fits no worker with its expected output;"
            " the longest takes 200"
        )

    def test_too_long_for_all_that_the_request_allows_is_so_too(self) -> None:
        fleet = Fleet()
        fleet.add("a", max_model_len=100)
        fleet.add("b", max_model_len=1000)
        asked = {"allowed_workers": frozenset("a")}
        assert refused(fleet, prompt(300), **asked).reason is Reason.PROMPT_TOO_LONG

    def test_while_a_worker_that_could_take_it_is_away_it_may_yet_be_served(self) -> None:
        fleet = Fleet()
        fleet.add("small", max_model_len=100)
        large = fleet.add("large", max_model_len=1000)
        fleet.say(large, healthy=False)
        assert refused(fleet, prompt(300)).reason is Reason.NO_ELIGIBLE_WORKER
        assert refused(fleet, prompt(3000)).reason is Reason.PROMPT_TOO_LONG
        fleet.say(large, healthy=True)
        fleet.core.drain("large")
        assert refused(fleet, prompt(300)).reason is Reason.NO_ELIGIBLE_WORKER

    def test_while_one_that_could_take_it_is_full_it_is_full(self) -> None:
        fleet = Fleet()
        fleet.add("small", max_model_len=100)
        fleet.say(fleet.add("large", max_model_len=1000, total_slots=1), running=1)
        assert refused(fleet, prompt(300)).reason is Reason.ALL_WORKERS_FULL


class TestPolicies:
    def test_an_unknown_policy_is_refused_with_those_there_are(self) -> None:
        fleet = Fleet()
        fleet.add("w0")
        refusal = refused(fleet, prompt(8), policy="best")
        assert refusal.reason is Reason.UNKNOWN_POLICY
        assert refusal.message == f"unknown policy 'best'; there are {', '.join(POLICIES)}"

    def test_a_request_may_name_any(self) -> None:
        fleet = Fleet()
        fleet.add("w0")
        for name in POLICIES:
            assert decide(fleet, prompt(8), policy=name).policy.name == name
        assert decide(fleet, prompt(8)).policy.name == "dynamo-adaptive"

    def test_unless_the_operator_forbids_it(self) -> None:
        fleet = Fleet(policy_per_request=False)
        fleet.add("w0")
        refusal = refused(fleet, prompt(8), policy="random")
        assert refusal.reason is Reason.POLICY_NOT_ALLOWED
        assert "routing.policy_per_request" in refusal.message
        assert refused(fleet, prompt(8), policy="nonsense").reason is Reason.POLICY_NOT_ALLOWED
        assert fleet.picked(prompt(8), policy="dynamo-adaptive") == "w0", "the configured one is"


class TestIdempotency:
    def test_the_same_id_and_prompt_get_the_same_answer_and_reserve_once(self) -> None:
        fleet = Fleet()
        for i in range(4):
            fleet.add(f"w{i}")
        first = fleet.route(prompt(50), request_id="x")
        before = snapshot(fleet)
        for _ in range(5):
            again = fleet.core.route(fleet.request(prompt(50), request_id="x"), fleet.now_s)
            assert again == Repeated(first.reservation)
        assert snapshot(fleet) == before

    @pytest.mark.parametrize(
        ("asked", "about"),
        [
            (prompt(51), {}),
            (prompt(50, first=1), {}),
            (prompt(50, cache_salt="t"), {}),
            (prompt(50), {"model": "m"}),
            (prompt(50), {"role": Role.DECODE}),
        ],
        ids=["longer", "other tokens", "other salt", "other model", "other phase"],
    )
    def test_an_id_that_was_used_for_something_else_is_refused(
        self, asked: Prompt, about: dict[str, Any]
    ) -> None:
        fleet = Fleet()
        fleet.add("w0")
        fleet.route(prompt(50), request_id="x")
        refusal = refused(fleet, asked, request_id="x", **about)
        assert refusal.reason is Reason.REQUEST_ID_REUSED
        assert "'x'" in refusal.message

    def test_a_finished_request_is_remembered_for_the_window(self) -> None:
        fleet = Fleet(memory_window_s=60.0)
        fleet.add("w0")
        first = fleet.route(prompt(8), request_id="x").reservation
        report(fleet, first.id, "finished")
        fleet.turn(59)
        again = fleet.core.route(fleet.request(prompt(8), request_id="x"), fleet.now_s)
        assert again == Repeated(first)
        assert fleet.loads() == {}
        fleet.turn(2)
        assert fleet.route(prompt(9), request_id="x").reservation is not first

    @pytest.mark.parametrize("failure", [one for one in Ending if one.name.startswith("FAILED")])
    def test_a_failed_request_is_routed_anew(self, failure: Ending) -> None:
        fleet = Fleet(policy="round-robin")
        fleet.add("w0")
        fleet.add("w1")
        first = fleet.route(prompt(8), request_id="x").reservation
        report(fleet, first.id, "failed", failure=failure)
        second = fleet.route(prompt(8), request_id="x").reservation
        assert second.worker != first.worker
        assert sum(requests for requests, _, _ in fleet.loads().values()) == 1
        assert report(fleet, first.id, "failed", failure=failure) is ProgressResult.UNCHANGED
        assert second.ended is None

    def test_a_request_whose_lease_or_worker_went_is_routed_anew(self) -> None:
        fleet = Fleet(lease_s=10.0)
        fleet.add("w0")
        first = fleet.route(prompt(8), request_id="x").reservation
        fleet.turn(10)
        assert first.ended is Ending.EXPIRED
        second = fleet.route(prompt(8), request_id="x").reservation
        fleet.add("w1")
        fleet.core.remove("w0", 60.0, fleet.now_s)
        assert second.ended is Ending.WORKER_LOST
        third = fleet.route(prompt(8), request_id="x").reservation
        assert third.worker.worker_id == "w1"

    def test_asking_again_begins_the_lease_anew(self) -> None:
        fleet = Fleet(lease_s=10.0)
        fleet.add("w0")
        first = fleet.route(prompt(8), request_id="x").reservation
        fleet.turn(9)
        fleet.core.route(fleet.request(prompt(8), request_id="x"), fleet.now_s)
        fleet.turn(9)
        assert first.ended is None
        fleet.turn(1)
        assert first.ended is Ending.EXPIRED

    def test_reservation_ids_name_their_replica_and_never_repeat(self) -> None:
        fleet = Fleet(replica="router-7")
        fleet.add("w0")
        ids = [fleet.route(prompt(8)).reservation.id for _ in range(20)]
        assert len(set(ids)) == 20
        assert all(one.startswith("router-7-") for one in ids)


class TestReports:
    def one(self) -> tuple[Fleet, Any]:
        fleet = Fleet(lease_s=10.0)
        key = fleet.add("w0")
        fleet.cache(key, prompt(64), 32)
        held = fleet.route(prompt(100)).reservation
        assert fleet.loads() == {key: (1, 7, 100 - 32)}
        return fleet, held

    def test_prefill_tokens_count_until_the_prompt_is_computed(self) -> None:
        fleet, held = self.one()
        assert report(fleet, held.id, "prefill_done") is ProgressResult.APPLIED
        assert fleet.loads() == {held.worker: (1, 7, 0)}
        assert report(fleet, held.id, "prefill_done") is ProgressResult.UNCHANGED
        assert fleet.loads() == {held.worker: (1, 7, 0)}

    def test_output_shows_that_the_prompt_is_computed_though_nobody_told(self) -> None:
        fleet, held = self.one()
        report(fleet, held.id, "running")
        assert fleet.loads() == {held.worker: (1, 7, 68)}
        assert report(fleet, held.id, "running", output_tokens=1) is ProgressResult.APPLIED
        assert fleet.loads() == {held.worker: (1, 7, 0)}

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_an_end_frees_all_of_it_once(self, state: str) -> None:
        fleet, held = self.one()
        assert report(fleet, held.id, state) is ProgressResult.APPLIED
        assert fleet.loads() == {}
        assert report(fleet, held.id, state) is ProgressResult.UNCHANGED
        assert report(fleet, held.id, "prefill_done") is ProgressResult.UNCHANGED
        assert fleet.loads() == {}
        assert fleet.core.endings.total() == 1

    def test_a_later_state_is_not_undone_by_an_earlier_one(self) -> None:
        fleet, held = self.one()
        report(fleet, held.id, "finished")
        assert report(fleet, held.id, "running", output_tokens=3) is ProgressResult.APPLIED
        assert held.output_tokens == 3, "a count may come late"
        assert held.ended is Ending.FINISHED
        assert fleet.loads() == {}

    def test_counts_are_cumulative(self) -> None:
        fleet, held = self.one()
        assert report(fleet, held.id, "running", output_tokens=5) is ProgressResult.APPLIED
        assert report(fleet, held.id, "running", output_tokens=5) is ProgressResult.UNCHANGED
        assert report(fleet, held.id, "running", output_tokens=3) is ProgressResult.UNCHANGED
        assert held.output_tokens == 5

    def test_cached_tokens_are_learned_once(self) -> None:
        fleet, held = self.one()
        report(fleet, held.id, "prefill_done", cached_tokens=48)
        report(fleet, held.id, "finished", cached_tokens=48)
        told = fleet.core.fleet.cache_reports[held.worker]
        assert (told.predicted, told.reported) == (32, 48)

    def test_cached_tokens_beyond_the_prompt_are_not_believed(self) -> None:
        fleet, held = self.one()
        report(fleet, held.id, "finished", cached_tokens=(1 << 32) - 1)
        assert held.cached_tokens == 100
        assert fleet.core.fleet.cache_reports[held.worker].reported == 100

    def test_a_late_report_leaves_no_trace_of_a_worker_that_is_gone(self) -> None:
        fleet, held = self.one()
        report(fleet, fleet.route(prompt(20)).reservation.id, "finished", cached_tokens=0)
        assert held.worker in fleet.core.fleet.cache_reports
        fleet.core.remove("w0", 60.0, fleet.now_s)
        assert report(fleet, held.id, "finished", cached_tokens=32) is ProgressResult.UNKNOWN
        assert fleet.core.fleet.cache_reports == {}
        assert fleet.core.fleet.loads == {}

    def test_a_reservation_of_another_replica_is_unknown(self) -> None:
        fleet, _ = self.one()
        before = snapshot(fleet)
        for state in ProgressState:
            assert report(fleet, "elsewhere-1", state) is ProgressResult.UNKNOWN
        assert snapshot(fleet) == before

    def test_who_reports_on_an_expired_one_learns_that_it_holds_nothing(self) -> None:
        fleet, held = self.one()
        fleet.turn(10)
        assert held.ended is Ending.EXPIRED
        assert report(fleet, held.id, "running") is ProgressResult.UNKNOWN
        assert report(fleet, held.id, "finished") is ProgressResult.UNKNOWN
        assert fleet.loads() == {}

    @pytest.mark.parametrize("state", ["running", "prefill_done"])
    def test_every_report_renews_the_lease(self, state: str) -> None:
        fleet, held = self.one()
        for _ in range(5):
            fleet.turn(9)
            report(fleet, held.id, state)
        assert held.ended is None
        fleet.turn(10)
        assert held.ended is Ending.EXPIRED

    def test_a_lease_that_ends_frees_the_load(self) -> None:
        fleet, _ = self.one()
        fleet.now_s += 9.999
        assert fleet.core.tick(fleet.now_s) == 0
        assert fleet.loads() != {}
        fleet.now_s += 0.001
        assert fleet.core.tick(fleet.now_s) == 1
        assert fleet.loads() == {}
        assert fleet.core.endings == {Ending.EXPIRED: 1}
        assert fleet.core.tick(fleet.now_s) == 0

    def test_leases_that_end_together_end_in_slices(self) -> None:
        fleet = Fleet(lease_s=10, memory_window_s=30, session_ttl_s=30)
        fleet.add("w0", total_slots=None, total_blocks=None)
        count = 1500
        for i in range(count):
            fleet.route(prompt(16 * (i % 3) + 1), session_id=f"s{i}")
        most = SLICE_UNITS // RESERVATION_UNITS
        fleet.now_s += 10
        assert fleet.core.tick(fleet.now_s) <= most
        slices = []
        while fleet.core.behind(fleet.now_s):
            slices.append(fleet.core.catch_up(fleet.now_s))
        assert max(slices) <= most
        assert fleet.core.endings == {Ending.EXPIRED: count}
        assert fleet.loads() == {}
        fleet.now_s += 30
        fleet.core.tick(fleet.now_s)
        dropped = (
            count - fleet.core.fleet.sessions.forgotten["no_room"] - len(fleet.core.fleet.sessions)
        )
        assert dropped <= FORGOTTEN_SLICE
        while fleet.core.behind(fleet.now_s):
            fleet.core.catch_up(fleet.now_s)
        assert repr(fleet.core.reservations) == "<Reservations 0 open, 0 remembered>"
        assert len(fleet.core.fleet.sessions) == 0

    def test_one_long_prompt_fills_a_slice(self) -> None:
        fleet = Fleet(lease_s=10, index=NativeIndex())
        fleet.add("w0", total_slots=None, total_blocks=None)
        for _ in range(2):
            fleet.route(prompt(16 * SLICE_UNITS))
        fleet.now_s += 10
        assert fleet.core.tick(fleet.now_s) == 1
        assert fleet.core.behind(fleet.now_s)
        assert fleet.core.catch_up(fleet.now_s) == 1
        assert not fleet.core.behind(fleet.now_s)

    def test_an_answer_that_could_not_be_given_is_withdrawn_once(self) -> None:
        fleet, held = self.one()
        fleet.core.withdraw(held, fleet.now_s)
        fleet.core.withdraw(held, fleet.now_s)
        assert fleet.loads() == {}
        assert fleet.core.endings == {Ending.FAILED_UNKNOWN: 1}


class TestSilence:
    def test_a_worker_whose_beats_stop_is_never_picked_again_once_its_time_is_up(self) -> None:
        fleet = Fleet(guard=UNGUARDED)
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

    def test_when_most_go_silent_at_once_they_are_routed_to_by_load(self) -> None:
        fleet = Fleet()
        asked = prompt(100)
        keys = [fleet.add(f"w{i}") for i in range(6)]
        fleet.cache(keys[0], asked)
        fleet.turn(5, silent=keys)
        decision = decide(fleet, asked)
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
                fleet.core.report(Progress(one.id, ProgressState.FINISHED), fleet.now_s)
        assert set(fleet.view.sources) == set(keys), "nobody is forgotten early"

    def test_those_that_beat_and_are_full_are_waited_for(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}", total_slots=2) for i in range(6)]
        fleet.turn(5, silent=keys[:4])
        for key in keys[4:]:
            fleet.say(key, running=2)
        assert refused(fleet, prompt(100)).reason is Reason.ALL_WORKERS_FULL

    def test_the_silent_are_tried_for_what_none_that_beats_may_take(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}", labels={"zone": "ab"[i < 4]}) for i in range(6)]
        fleet.turn(5, silent=keys[:4])
        pick = fleet.route(prompt(100), required_labels={"zone": "b"})
        assert pick.reservation.worker in keys[:4]
        decision = decide(fleet, prompt(100))
        assert [source.key for source in decision.sources] == keys[4:]
        for key in keys[4:]:
            fleet.core.drain(key.worker_id)
        assert fleet.route(prompt(100)).reservation.worker in keys[:4]
        fleet.core.undrain(keys[4].worker_id)
        assert fleet.route(prompt(100)).reservation.worker == keys[4]

    def test_silence_of_a_minority_is_no_last_resort(self) -> None:
        fleet = Fleet()
        keys = [fleet.add(f"w{i}", labels={"zone": "ab"[i < 2]}) for i in range(6)]
        fleet.turn(5, silent=keys[:2])
        refusal = refused(fleet, prompt(100), required_labels={"zone": "b"})
        assert refusal.reason is Reason.NO_ELIGIBLE_WORKER

    def test_of_a_pair_each_half_prefers_those_that_beat(self) -> None:
        fleet = Fleet()
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

    def test_a_worker_whose_heartbeats_cant_be_read_comes_last(self) -> None:
        fleet = Fleet()
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

    def test_a_removed_worker_ends_its_reservations_and_stays_away(self) -> None:
        fleet = Fleet()
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
    def test_the_age_of_a_sample_is_by_the_relays_clock_alone(self) -> None:
        fleet = Fleet()
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

    def test_a_heartbeat_without_a_sample_changes_no_load(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0", sampled_at_s=None, running=9)
        assert fleet.core.fleet.load_of(key).running == 0
        assert fleet.core.fleet.load_of(key).sampled_at_s is None


class TestDeciding:
    def test_deciding_changes_nothing(self) -> None:
        fleet = Fleet()
        for i in range(4):
            fleet.add(f"w{i}")
        fleet.route(prompt(50))
        before = snapshot(fleet)
        for _ in range(10):
            decide(fleet, prompt(60))
        assert snapshot(fleet) == before

    def test_order_is_the_pick_and_the_next_best(self) -> None:
        fleet = Fleet(alternatives=2)
        asked = prompt(200)
        for i, tokens in enumerate([32, 96, 0, 160, 64]):
            fleet.cache(fleet.add(f"w{i}"), asked, tokens)
        decision = decide(fleet, asked)
        assert [decision.rows.workers[row].worker_id for row in decision.order] == [
            "w3",
            "w1",
            "w4",
        ]
        assert decision.tied == 1

    def test_there_is_a_runner_up_even_if_answers_carry_no_alternatives(self) -> None:
        fleet = Fleet(alternatives=0)
        fleet.add("w0")
        fleet.add("w1")
        assert len(decide(fleet, prompt(8)).order) == 2

    def test_stages_are_marked_in_order(self) -> None:
        fleet = Fleet()
        fleet.add("w0")
        marks: list[str] = []
        fleet.core.route(fleet.request(prompt(8)), fleet.now_s, marks.append)
        assert marks == ["hash", "match", "cost"]

    def test_exclusions_count_every_worker_that_cannot_be_picked(self) -> None:
        fleet = Fleet()
        for i in range(5):
            fleet.add(f"w{i}", role="decode" if i < 2 else "both")
        fleet.say(WorkerKey("w2", 0), healthy=False)
        fleet.core.drain("w3")
        assert decide(fleet, prompt(8)).exclusions() == {
            "role is decode": 2,
            "engine not answering": 1,
            "drained": 1,
        }


PROMPTS = [prompt(8), prompt(40), prompt(64), prompt(100), prompt(48, first=500), prompt(70, 500)]


class Conservation(RuleBasedStateMachine):
    """Whatever happens, the load we count is the sum over the reservations that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lease_s=20.0, memory_window_s=30.0, reservations_max=11)
        self.made: list[Any] = []
        self.asked = Counter[str]()

    @initialize()
    def some_workers(self) -> None:
        for i in range(3):
            self.fleet.add(f"w{i}", total_slots=4, total_blocks=60)

    @rule(
        asked=st.sampled_from(PROMPTS),
        request_id=st.none() | st.sampled_from("abc"),
        policy=st.sampled_from(sorted(POLICIES)),
        unwanted=st.frozensets(st.sampled_from(["w0", "w1"]), max_size=1),
    )
    def route(
        self, asked: Prompt, request_id: str | None, policy: str, unwanted: frozenset[str]
    ) -> None:
        named = {"request_id": request_id} if request_id else {}
        request = self.fleet.request(asked, policy=policy, excluded_workers=unwanted, **named)
        before = self.fleet.loads()
        try:
            outcome = self.fleet.core.route(request, self.fleet.now_s)
        except Refusal as refusal:
            self.asked[refusal.reason] += 1
            assert self.fleet.loads() == before
            return
        if isinstance(outcome, Repeated):
            self.asked["repeated"] += 1
            assert self.fleet.loads() == before
            return
        self.asked["picked"] += 1
        assert outcome.reservation.worker.worker_id not in unwanted
        self.made.append(outcome.reservation)

    @rule(i=st.integers(0, 30), state=st.sampled_from(ProgressState), output=st.integers(0, 9))
    def report(self, i: int, state: ProgressState, output: int) -> None:
        known = [one for one in self.made if one.ended is None] or self.made
        if known:
            report(self.fleet, known[i % len(known)].id, state, output_tokens=output)

    @rule(i=st.integers(0, 30), state=st.sampled_from(ProgressState))
    def report_late(self, i: int, state: ProgressState) -> None:
        if i < len(self.made) and (late := self.made[i]).ended is not None:
            assert report(self.fleet, late.id, state) is not ProgressResult.APPLIED

    @rule(worker=st.integers(0, 2), running=st.integers(0, 5), used=st.integers(0, 50))
    def sample(self, worker: int, running: int, used: int) -> None:
        key = WorkerKey(f"w{worker}", 0)
        if key in self.fleet.view.sources:
            self.fleet.say(key, running=running, used_blocks=float(used))

    @rule(seconds=st.sampled_from([0.25, 1, 5, 12]), silent=st.sampled_from(["", "w0", "w1"]))
    def time_goes_by(self, seconds: float, silent: str) -> None:
        self.fleet.turn(seconds, silent=[WorkerKey(silent, 0)])

    @rule(worker=st.just("w2"))
    def remove_and_come_back(self, worker: str) -> None:
        self.fleet.core.remove(worker, 0.01, self.fleet.now_s)
        self.fleet.now_s += 1
        self.fleet.tick()
        self.fleet.add(worker, total_slots=4, total_blocks=60)

    @invariant()
    def ours_is_the_sum_over_open_reservations(self) -> None:
        expected: dict[WorkerKey, tuple[int, int, int]] = {}
        still_open = [one for one in self.made if one.ended is None]
        for key in {one.worker for one in still_open}:
            here = [one for one in still_open if one.worker == key]
            blocks = {block for one in here for block in one.prefixes.tolist()}
            expected[key] = (
                len(here),
                len(blocks) + sum(one.has_tail for one in here),
                sum(one.new_tokens for one in here if not one.prefill_done),
            )
        assert self.fleet.loads() == expected
        assert len(self.fleet.core.reservations) == len(still_open)

    @invariant()
    def every_reservation_that_was_made_is_open_or_ended_once(self) -> None:
        still_open = sum(one.ended is None for one in self.made)
        assert len(self.made) == still_open + self.fleet.core.endings.total()
        assert self.asked["picked"] == len(self.made)

    @invariant()
    def no_load_is_negative(self) -> None:
        for load in self.fleet.core.fleet.loads.values():
            assert load.active_requests() >= load.requests >= 0
            assert load.active_blocks() >= load.blocks >= 0
            assert load.prefill_tokens >= 0

    @invariant()
    def nothing_is_kept_of_workers_that_are_gone(self) -> None:
        assert set(self.fleet.core.fleet.loads) <= set(self.fleet.view.sources)


TestConservation = Conservation.TestCase
TestConservation.settings = settings(
    derandomize=True, deadline=None, max_examples=200, stateful_step_count=50
)


class TestPredictions:
    def test_a_burst_of_siblings_lands_together_before_any_event(self) -> None:
        fleet = Fleet(guard=UNGUARDED)
        for worker in "abcd":
            fleet.add(worker)
        siblings = [fleet.picked(prompt(400)) for _ in range(5)]
        assert len(set(siblings)) == 1
        others = {fleet.picked(prompt(400, first=10_000 * i)) for i in range(1, 20)}
        assert len(others) > 1

    def test_without_a_time_to_live_nothing_is_predicted(self) -> None:
        fleet = Fleet(predicted_ttl_s=0.0)
        key = fleet.add("a")
        fleet.cache(key, prompt(64, first=999))
        assert all(fleet.route(prompt(400)).decision.overlap(0).raw == 0 for _ in range(3))

    def test_the_receipt_tells_what_is_known_from_what_is_predicted(self) -> None:
        fleet = Fleet()
        key = fleet.add("a")
        fleet.cache(key, prompt(400), 160)
        fleet.route(prompt(400))
        overlap = fleet.route(prompt(400)).decision.overlap(0)
        assert overlap == Overlap(raw=400, usable=384, device=160, host=0, disk=0, predicted=224)
        assert overlap.by_events == 160

    def test_a_worker_without_events_is_known_by_our_own_picks_for_longer(self) -> None:
        fleet = Fleet()
        fleet.add("quiet", events=False)
        fleet.route(prompt(400))
        fleet.turn(60)
        assert fleet.route(prompt(400)).decision.overlap(0).predicted == 384

    def test_a_prediction_that_no_event_confirms_is_over_soon(self) -> None:
        fleet = Fleet()
        key = fleet.add("a")
        fleet.cache(key, prompt(64, first=999))
        fleet.route(prompt(400))
        fleet.turn(11)
        assert fleet.route(prompt(400)).decision.overlap(0).raw == 0

    def test_what_a_partial_stream_never_told_is_learned_from_reports(self) -> None:
        fleet = Fleet()
        key = fleet.add("a")
        fleet.cache(key, prompt(64, first=999))
        fleet.beat(key, complete=False)
        asked = fleet.route(prompt(400)).reservation
        fleet.core.fleet.view.predictions.forget(0)
        fleet.view.index.unpredict(0, 0, asked.prefixes)
        step = Progress(asked.id, ProgressState.FINISHED, cached_tokens=320)
        fleet.core.report(step, fleet.now_s)
        assert fleet.core.fleet.self_check.learned_blocks == 20
        assert fleet.route(prompt(400)).decision.overlap(0).predicted == 320


class TestMemory:
    @pytest.mark.parametrize(("cached_tokens", "kept"), [(None, 25), (0, 0), (384, 0)])
    def test_an_ended_reservation_keeps_hashes_only_while_a_report_may_be_checked_against_them(
        self, cached_tokens: int | None, kept: int
    ) -> None:
        fleet = Fleet()
        fleet.add("a")
        reservation = fleet.route(prompt(400)).reservation
        step = Progress(reservation.id, ProgressState.FINISHED, cached_tokens=cached_tokens)
        fleet.core.report(step, fleet.now_s)
        assert len(reservation.prefixes) == kept
        assert fleet.loads() == {}


class TestChances:
    def test_where_a_policy_gives_chances_the_pick_is_drawn_by_them(self) -> None:
        def score(rows: Candidates, _: Parameters) -> Scores:
            return Scores(np.array([0.0, 1.0, 2.0, 3.0]), chances=np.array([0.0, 1.0, 3.0, 4.0]))

        fleet = Fleet()
        fleet.core.policies["drawn"] = Policy("drawn", "", "", Parameters(), score)
        for name in "abcd":
            fleet.add(name)
        fleet.core.drain("d")
        picks: Counter[str] = Counter()
        for _ in range(400):
            decision = fleet.core.decide(fleet.request(prompt(8), policy="drawn"), fleet.now_s)
            names = [decision.rows.workers[row].worker_id for row in decision.order]
            picks[names[0]] += 1
            assert names == {"b": ["b", "a", "c"], "c": ["c", "a", "b"]}[names[0]]
        assert picks["b"] + picks["c"] == 400
        assert 70 < picks["b"] < 130  # a quarter, and what five standard deviations may add
