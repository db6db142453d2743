"""Presets: what they set, and that each key of the operator's own wins over theirs."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from events.plane.settings import NatsSettings
from router.app.main import cli
from router.app.processes.router_process import RouterApp
from router.config.keys import ConfigError
from router.config.reading import load, load_with_sources
from router.config.reload import RELOADED
from router.config.settings import presets
from router.config.settings.configurations import ServeConfig
from router.config.settings.health_settings import CapacitySettings
from router.config.settings.presets import PRESETS, Preset
from router.config.settings.routing_settings import GuardSettings, RoutingSettings
from router.decide.policies.configured import configured

NAMES = list(PRESETS)
OWN = {
    "policy": "ttft",
    "alternatives": 4,
    "parameters": {"ttft": {"keep": 3.0, "stall": 0.5}},
    "guard": {"policies": ["ttft"]},
    "capacity": {"prefill_tokens_max": 90, "decode_requests_max": 9},
    "hot_prefixes": {"enabled": True},
    "affinity": {"bonus": {"ttft": 1.5}},
}
"""A preset that sets keys of every depth."""


@pytest.fixture
def chat_is_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "chat", Preset("for tests", OWN, "nothing"))


def of(file: Path, text: str, **flags: Any) -> ServeConfig:
    file.write_text(text)
    return load(ServeConfig, file, {}, {("routing", name): value for name, value in flags.items()})


def preset_of(name: str) -> RoutingSettings:
    return load(ServeConfig, None, {}, {("routing", "preset"): name}).routing


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_keys_that_there_are_and_that_a_reload_changes(name: str) -> None:
    routing = preset_of(name)
    assert routing.preset == name
    assert set(PRESETS[name].sets) < set(RELOADED) - {"preset"}  # type: ignore[index]
    configured(routing)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_that_changes_nothing_sets_nothing(name: str) -> None:
    routing = msgspec.structs.replace(preset_of(name), preset="balanced")
    assert (routing == RoutingSettings()) == (not PRESETS[name].sets)  # type: ignore[index]


def test_the_default_preset_is_the_defaults() -> None:
    assert load(ServeConfig, None, {}, {}) == ServeConfig()
    assert PRESETS[ServeConfig().routing.preset].sets == {}


def test_an_unknown_preset_is_refused_with_its_key_and_the_names_that_there_are(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'bacth' is none of .*, did you mean `batch`\? - at `\$\.routing\.preset`",
    ):
        of(tmp_path / "kvroute.yaml", "routing: {preset: bacth}")


@pytest.mark.usefixtures("chat_is_own")
def test_own_keys_win_over_the_presets_one_by_one(tmp_path: Path) -> None:
    text = """
routing:
  preset: chat
  alternatives: 1
  parameters: {ttft: {keep: 2}, dynamo-blocks: {temperature: 1}}
  guard: {policies: []}
  capacity: {prefill_tokens_max: 10}
  affinity: {bonus: {least-loaded: 2}}
"""
    routing = of(tmp_path / "kvroute.yaml", text, alternatives=3).routing
    assert (routing.policy, routing.alternatives) == ("ttft", 3)
    assert routing.parameters == {
        "ttft": {"keep": 2.0, "stall": 0.5},
        "dynamo-blocks": {"temperature": 1.0},
    }
    assert routing.guard == GuardSettings(policies=())
    assert routing.capacity == CapacitySettings(prefill_tokens_max=10, decode_requests_max=9)
    assert routing.affinity.bonus == {"ttft": 1.5, "least-loaded": 2.0}


@pytest.mark.usefixtures("chat_is_own")
def test_a_flag_chooses_a_preset_for_what_the_file_leaves_out(tmp_path: Path) -> None:
    text = "routing: {preset: batch, policy: round-robin}"
    routing = of(tmp_path / "kvroute.yaml", text, preset="chat").routing
    assert (routing.preset, routing.policy, routing.alternatives) == ("chat", "round-robin", 4)


@pytest.mark.usefixtures("chat_is_own")
def test_settings_of_a_model_lie_over_the_presets(tmp_path: Path) -> None:
    text = """
routing: {preset: chat}
models:
- {name: code, routing: {policy: round-robin, guard: {policies: [conductor]}}}
- {name: talk}
"""
    code, talk = of(tmp_path / "kvroute.yaml", text).models
    assert code.routing is not None
    assert code.routing.policy == "round-robin"
    assert code.routing.guard == GuardSettings(policies=("conductor",))
    assert talk.routing is None


@pytest.mark.usefixtures("chat_is_own")
def test_each_value_names_the_preset_that_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text(
        "routing: {preset: chat, alternatives: 1, capacity: {prefill_tokens_max: 10}}\n"
        "models: [{name: m, routing: {guard: {policies: []}}}]\n"
    )
    _, sources = load_with_sources(ServeConfig, file, {}, {})
    routing = ("routing",)
    assert sources.of((*routing, "preset")) == str(file)
    assert sources.of((*routing, "policy")) == "preset chat"
    assert sources.of((*routing, "alternatives")) == str(file)
    assert sources.of((*routing, "parameters", "ttft", "keep")) == "preset chat"
    assert sources.of((*routing, "capacity", "prefill_tokens_max")) == str(file)
    assert sources.of((*routing, "capacity", "decode_requests_max")) == "preset chat"
    assert sources.of((*routing, "capacity", "prefill_requests_max")) == "default"
    assert sources.of((*routing, "lease_s")) == "default"
    assert sources.of(("models", 0, "routing", "guard", "policies")) == str(file)
    assert sources.of(("models", 0, "routing", "policy")) == "default"


@pytest.mark.usefixtures("chat_is_own")
async def test_another_preset_takes_effect_while_a_router_runs(tmp_path: Path) -> None:
    file = tmp_path / "kvroute.yaml"
    read = partial(load, ServeConfig, file, {}, {})
    nats = "nats: {url: 'nats://127.0.0.1:1'}\n"
    file.write_text(nats)
    app = RouterApp(read(), read_again=read)
    file.write_text(nats + "routing: {preset: chat, alternatives: 1}\n")
    await app.reload()
    assert (app.config.routing.preset, app.config.routing.policy) == ("chat", "ttft")
    assert app.config.routing.guard.policies == ("ttft",)
    assert app.config.routing.alternatives == 1
    file.write_text(nats)
    await app.reload()
    assert app.config == ServeConfig(nats=NatsSettings(url="nats://127.0.0.1:1"))


def test_presets_are_listed_with_what_each_sets_and_why() -> None:
    shown = CliRunner().invoke(cli, ["policies", "--presets"]).output
    as_json = CliRunner().invoke(cli, ["policies", "--presets", "--json"]).output
    rows = {row["name"]: row for row in msgspec.json.decode(as_json)}
    assert list(rows) == NAMES
    for name, preset in PRESETS.items():
        assert preset.chosen_on in shown
        assert rows[name] == {
            "name": name,
            "summary": preset.summary,
            "sets": preset.sets,
            "chosen_on": preset.chosen_on,
        }


def test_the_keys_that_a_preset_sets_are_listed_as_check_config_names_them() -> None:
    assert list(presets.lines(OWN)) == [
        "routing.policy: ttft",
        "routing.alternatives: 4",
        "routing.parameters.ttft.keep: 3.0",
        "routing.parameters.ttft.stall: 0.5",
        "routing.guard.policies: [ttft]",
        "routing.capacity.prefill_tokens_max: 90",
        "routing.capacity.decode_requests_max: 9",
        "routing.hot_prefixes.enabled: true",
        "routing.affinity.bonus.ttft: 1.5",
    ]
