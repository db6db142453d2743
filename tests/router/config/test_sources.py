"""Where each value of a configuration came from, as `kvroute check-config` prints it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config.reading import load_with_sources
from router.config.rendering import render
from router.config.settings.configurations import ServeConfig
from router.config.settings.routing_settings import GuardSettings
from router.config.sources import KeyPath, annotated

FILE = """
routing: {lease_s: 7, capacity: {prefill_tokens_max: 9}, alternatives: 1, reservations_max: 5,
  own_policies: ["a:b"]}
models: [{name: m, aliases: [n], routing: {policy: ttft, guard: {policies: [ttft]},
  parameters: {ttft: {keep: 2}}}}]
nats: {password: hush}
"""
ENVIRONMENT = {
    "KVROUTE_ROUTING_ALTERNATIVES": "2",
    "KVROUTE_ROUTING_RESERVATIONS_MAX": "6",
    "KVROUTE_WORKERS": "[{id: w, engine: vllm, address: 'http://h'}]",
    "KVROUTE_ROUTING_PARAMETERS": "{ttft: {stall: 0.1}}",
}
FLAGS: dict[tuple[str, ...], object] = {("routing", "reservations_max"): 7}


def of_layers(tmp_path: Path) -> Any:
    file = tmp_path / "kvroute.yaml"
    file.write_text(FILE)
    return load_with_sources(ServeConfig, file, ENVIRONMENT, FLAGS)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (("routing", "lease_s"), "kvroute.yaml"),
        (("routing", "alternatives"), "KVROUTE_ROUTING_ALTERNATIVES"),
        (("routing", "reservations_max"), "--routing-reservations-max"),
        (("routing", "session_ttl_s"), "default"),
        (("routing", "parameters", "ttft", "stall"), "KVROUTE_ROUTING_PARAMETERS"),
        (("models", 0, "routing", "policy"), "kvroute.yaml"),
        (("models", 0, "routing", "guard", "policies"), "kvroute.yaml"),
        (("routing", "capacity", "prefill_tokens_max"), "kvroute.yaml"),
        (("routing", "capacity", "decode_requests_max"), "default"),
        (("models", 0, "block_size"), "default"),
        (("models", 1, "name"), "default"),
        (("workers", 0, "id"), "KVROUTE_WORKERS"),
        (("workers", 0, "ranks"), "default"),
    ],
)
def test_the_highest_layer_that_sets_a_value_is_its_source(
    path: KeyPath, source: str, tmp_path: Path
) -> None:
    _, sources = of_layers(tmp_path)
    assert Path(sources.of(path)).name == source


def test_the_printed_text_is_the_configuration_with_a_source_behind_each_value(
    tmp_path: Path,
) -> None:
    config, sources = of_layers(tmp_path)
    text = annotated(render(config), sources)
    assert yaml.safe_load(text) == yaml.safe_load(render(config))
    assert "hush" not in text
    told = {
        line.partition("  # ")[0].strip(): line.partition("  # ")[2] for line in text.split("\n")
    }
    assert told["reservations_max: 7"] == "--routing-reservations-max"
    assert told["policy: ttft"].endswith("kvroute.yaml")
    assert told["aliases:"].endswith("kvroute.yaml")
    assert config.models[0].routing.guard == GuardSettings(policies=("ttft",))
    assert told["- id: w"] == "KVROUTE_WORKERS"
    assert told["lease_s: 7.0"].endswith("kvroute.yaml")
    assert told["policy: dynamo-adaptive"] == "default"


def test_long_and_odd_values_stay_what_they_are(tmp_path: Path) -> None:
    odd = "many words, " * 20 + "# no comment: 'quoted'\n\nlines"
    file = tmp_path / "kvroute.yaml"
    file.write_text(yaml.safe_dump({"decision_log": {"file": odd}, "grpc": {"unix_socket": ""}}))
    config, sources = load_with_sources(ServeConfig, file, {}, {})
    assert yaml.safe_load(annotated(render(config), sources)) == yaml.safe_load(render(config))
