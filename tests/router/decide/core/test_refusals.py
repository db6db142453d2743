"""Requests that are refused: no worker, no room, too long, an unknown policy."""

from math import nan

import numpy as np

from indexer.identity import WorkerKey
from router.config.settings.configurations import ModelSettings
from router.decide.policies import POLICIES
from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores
from router.fleet.models import MODELS_MAX
from router.request.refusal import Reason
from tests.router.decide.core.outcomes import excluded, refused
from tests.stage.fleet import Fleet, prompt


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

    def test_a_model_that_nobody_ever_served_is_unknown(self, fleet: Fleet) -> None:
        fleet.add("w0", model="alpha")
        refusal = refused(fleet, prompt(8), model="gpt")
        assert refusal.reason is Reason.UNKNOWN_MODEL
        assert refusal.message == "unknown model 'gpt'; served here: alpha"

    def test_before_the_router_is_ready_no_model_is_unknown(self, fleet: Fleet) -> None:
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

    def test_a_model_whose_workers_went_is_known_for_300_seconds(self, fleet: Fleet) -> None:
        gone = fleet.add("gone", model="alpha", model_aliases=("a",), lora_names=("ad",))
        fleet.add("stays", model="beta")
        fleet.core.remove(gone.worker_id, 3600.0, fleet.now_s)
        fleet.turn(299)
        for name in ("alpha", "a", "ad"):
            assert refused(fleet, prompt(8), model=name).reason is Reason.NO_WORKER
        fleet.turn(2)
        for name in ("alpha", "a", "ad"):
            assert refused(fleet, prompt(8), model=name).reason is Reason.UNKNOWN_MODEL

    def test_a_model_is_known_for_as_long_when_nobody_at_all_is_left(self, fleet: Fleet) -> None:
        fleet.add("gone", model="alpha")
        fleet.core.remove("gone", 3600.0, fleet.now_s)
        fleet.turn(299)
        refusal = refused(fleet, prompt(8), model="alpha")
        assert refusal.message == "no worker serves 'alpha' at the moment"

    def test_model_names_are_remembered_up_to_a_bound(self, fleet: Fleet) -> None:
        for i in range(MODELS_MAX // 1000 + 1):
            fleet.add(f"w{i}", lora_names=tuple(f"lora-{i}-{n}" for n in range(1000)))
        assert len(fleet.core.fleet.models.seen) == MODELS_MAX

    def test_when_all_of_a_pool_are_silent_nobody_is_live(self, fleet: Fleet) -> None:
        silent = fleet.add("silent", model="alpha")
        fleet.add("other", model="beta")
        fleet.turn(5, silent=[silent])
        refusal = refused(fleet, prompt(8), model="alpha")
        assert refusal.reason is Reason.NO_WORKER
        assert refusal.message == "no live worker for 'alpha' (silent: 1)"

    def test_a_decision_without_live_workers_still_says_who_is_there(self, fleet: Fleet) -> None:
        sick = fleet.add("sick")
        fleet.say(sick, healthy=False)
        decision = fleet.decide(prompt(8))
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

    def test_our_own_reservations_fill_a_worker_up(self, fleet: Fleet) -> None:
        fleet.add("w0", total_slots=3)
        for _ in range(3):
            fleet.route(prompt(8))
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.ALL_WORKERS_FULL
        assert refusal.retry_after_s == 0.5
        assert refusal.message == "no worker has room (full: 1)"

    def test_blocks_fill_a_worker_up_too_shared_ones_once(self, fleet: Fleet) -> None:
        fleet.add("w0", total_blocks=5, total_slots=None)
        asked = prompt(64)  # 4 blocks
        for _ in range(10):
            fleet.route(asked)
        fleet.route(prompt(16, first=1000))
        assert refused(fleet, asked).reason is Reason.ALL_WORKERS_FULL

    def test_room_comes_back_with_a_report(self, fleet: Fleet) -> None:
        fleet.add("w0", total_slots=1)
        held = fleet.route(prompt(8)).reservation
        assert refused(fleet, prompt(8)).reason is Reason.ALL_WORKERS_FULL
        fleet.report(held, "finished")
        assert fleet.picked(prompt(8)) == "w0"

    def test_an_unknown_total_is_never_full(self, fleet: Fleet) -> None:
        fleet.add("w0", total_blocks=None, total_slots=None)
        fleet.say(WorkerKey("w0", 0), running=10**6, used_blocks=1e8)
        assert fleet.picked(prompt(8)) == "w0"

    def test_some_full_and_the_others_not_eligible_is_full(self, fleet: Fleet) -> None:
        fleet.say(fleet.add("full", total_slots=1), running=1)
        fleet.add("other")
        fleet.core.drain("other")
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.ALL_WORKERS_FULL
        assert refusal.message == "no worker has room (drained: 1, full: 1)"

    def test_over_reservations_max_requests_are_shed_before_any_work(self) -> None:
        fleet = Fleet("w0", reservations_max=2)
        fleet.route(prompt(8))
        held = fleet.route(prompt(8)).reservation
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.TOO_MANY_RESERVATIONS
        assert refusal.retry_after_s == 0.5
        assert "routing.reservations_max" in refusal.message
        fleet.report(held, "finished")
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
        fleet = Fleet("w0", prompt_tokens_max=100)
        asked = prompt(101)
        refusal = refused(fleet, asked)
        assert refusal.reason is Reason.PROMPT_TOO_LONG
        assert refusal.message == (
            "the prompt has 101 tokens, the limit is 100 (routing.prompt_tokens_max)"
        )
        assert asked._prefixes == {}
        assert fleet.picked(prompt(100)) == "w0"

    def test_too_long_for_all_is_the_callers_mistake(self, fleet: Fleet) -> None:
        fleet.add("a", max_model_len=100)
        fleet.add("b", max_model_len=200)
        refusal = refused(fleet, prompt(300))
        assert refusal.reason is Reason.PROMPT_TOO_LONG
        assert refusal.message == (
            "the prompt has 300 tokens and fits no worker with its expected output;"
            " the longest context is 200 tokens"
        )

    def test_too_long_for_all_that_the_request_allows_is_so_too(self, fleet: Fleet) -> None:
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

    def test_while_one_that_could_take_it_is_full_it_is_full(self, fleet: Fleet) -> None:
        fleet.add("small", max_model_len=100)
        fleet.say(fleet.add("large", max_model_len=1000, total_slots=1), running=1)
        assert refused(fleet, prompt(300)).reason is Reason.ALL_WORKERS_FULL


class TestPolicies:
    def test_an_unknown_policy_is_refused_with_those_there_are(self) -> None:
        fleet = Fleet("w0")
        refusal = refused(fleet, prompt(8), policy="best")
        assert refusal.reason is Reason.UNKNOWN_POLICY
        assert refusal.message == f"unknown policy 'best'; there are {', '.join(POLICIES)}"

    def test_a_request_may_name_any(self) -> None:
        fleet = Fleet("w0")
        for name in POLICIES:
            assert fleet.decide(prompt(8), policy=name).policy.name == name
        assert fleet.decide(prompt(8)).policy.name == "dynamo-adaptive"

    def test_unless_the_operator_forbids_it(self) -> None:
        fleet = Fleet("w0", policy_per_request=False)
        refusal = refused(fleet, prompt(8), policy="round-robin")
        assert refusal.reason is Reason.POLICY_NOT_ALLOWED
        assert "routing.policy_per_request" in refusal.message
        assert refused(fleet, prompt(8), policy="nonsense").reason is Reason.POLICY_NOT_ALLOWED
        assert fleet.picked(prompt(8), policy="dynamo-adaptive") == "w0", "the configured one is"
