"""Names of models, aliases and LoRA adapters in requests."""

import pytest

from router.config.settings.configurations import ModelSettings
from router.fleet.eligibility import LORA_ELSEWHERE
from router.fleet.pools import _POOLS_MAX
from router.request.refusal import Reason
from tests.router.decide.core.outcomes import excluded, overlap_of, refused
from tests.stage.fleet import Fleet, prompt


class TestModels:
    def test_a_request_goes_to_workers_of_its_model(self, fleet: Fleet) -> None:
        fleet.add("a", model="alpha")
        fleet.add("b", model="beta", model_aliases=("b",))
        for _ in range(4):
            assert fleet.picked(prompt(8), model="alpha") == "a"
            assert fleet.picked(prompt(8), model="beta") == "b"
            assert fleet.picked(prompt(8), model="b") == "b"

    def test_a_fleet_of_one_model_needs_no_name(self, fleet: Fleet) -> None:
        fleet.add("a", model="alpha")
        assert fleet.picked(prompt(8)) == "a"

    def test_a_fleet_of_several_models_does(self, fleet: Fleet) -> None:
        fleet.add("a", model="alpha")
        fleet.add("b", model="beta")
        refusal = refused(fleet, prompt(8))
        assert refusal.reason is Reason.MODEL_REQUIRED
        assert refusal.message == (
            "this fleet serves 2 models, so the request must name one: alpha, beta"
        )

    def test_a_worker_that_has_not_told_its_model_makes_no_second_one(self, fleet: Fleet) -> None:
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

    def test_a_lora_is_a_model_and_salts_the_prompt(self, fleet: Fleet) -> None:
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

    def test_a_named_lora_goes_where_it_is_loaded_or_may_be(self, fleet: Fleet) -> None:
        fleet.add("has", lora_names=("ad",))
        fleet.add("has-not", lora_names=("bc",))
        fleet.add("loads-any")
        assert excluded(fleet, prompt(8, lora_name="ad"), model="m") == {
            "has-not": "LoRA not loaded"
        }

    def test_a_lora_that_is_loaded_nowhere_goes_where_it_may_be_loaded(self, fleet: Fleet) -> None:
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
        pick = fleet.route(
            prompt(8, lora_name="new"), model="new", excluded_workers=frozenset({"alias"})
        )
        assert pick.reservation.worker == loads
        assert refused(fleet, prompt(8), model="away").reason is Reason.NO_WORKER
        fleet.say(other, loads_loras=True)
        refusal = refused(fleet, prompt(8), model="unheard")
        assert refusal.reason is Reason.UNKNOWN_MODEL
        assert refusal.message.endswith("is named beside its model (lora_name)")

    def test_a_lora_that_was_evicted_is_loaded_once_more_and_a_model_that_is_gone_is_not(
        self, fleet: Fleet
    ) -> None:
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

    def test_names_of_loras_to_be_loaded_are_kept_up_to_a_bound(self, fleet: Fleet) -> None:
        fleet.add("loads", loads_loras=True)
        for i in range(_POOLS_MAX + 10):
            fleet.decide(prompt(8), model=f"lora-{i}")
            assert len(fleet.core.fleet.pools._pools) <= _POOLS_MAX

    def test_serves_says_for_lists_what_pools_are_made_of(self) -> None:
        fleet = Fleet(models=(ModelSettings(name="llama", aliases=("alias",)),))
        key = fleet.add("a", model="llama", model_aliases=("l",), lora_names=("ad",))
        source = fleet.view.sources[key]
        assert all(fleet.core.fleet.serves(source, name) for name in ("llama", "alias", "l", "ad"))
        assert not fleet.core.fleet.serves(source, "other")
        source.heartbeat = None
        assert not fleet.core.fleet.serves(source, "llama")
