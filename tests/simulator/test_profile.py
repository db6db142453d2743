"""Profiles: what ships is sound, and mistakes in a file are told by their key."""

from pathlib import Path

import pytest

from indexer.identity import Tier
from simulator.engines.cost_model import Distance, LinearCost, PolynomialCost, PrefillChunk
from simulator.engines.profile import (
    PROFILES,
    ProfileError,
    Roofline,
    load_profile,
    parse_profile,
    profile_names,
)

GPU_BYTES = 85.5e9
"""An H100's memory, 81,559 MiB."""


@pytest.fixture
def text() -> str:
    """A profile that is in order."""
    return (PROFILES / "mocker.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_that_ships_can_be_loaded_and_moves_kv_cache(name: str) -> None:
    profile = load_profile(name)
    cost = profile.cost_model()
    assert 0 < cost.step_s([], 1, 1000) < 0.1
    assert 0 < cost.load_s(1000, Tier.HOST) < cost.load_s(1000, Tier.DISK)
    near, rack, far = (cost.transfer_s(1000, distance) for distance in Distance)
    assert 0 < near < rack < far
    assert profile.engine.blocks_of(2 * profile.engine.block_size) == (
        profile.engine.block_count // 2
    )


def test_the_rooflines_are_in_the_range_of_published_numbers() -> None:
    small, large = (
        load_profile(name).cost_model() for name in ("llama-8b-h100", "llama-70b-4xh100")
    )
    assert isinstance(small, LinearCost)
    assert isinstance(large, LinearCost)
    assert 0.005 < small.step_s([], 1, 1000) < 0.012
    assert 25_000 < 1 / small.prefill_token_s < 40_000
    assert 0.015 < large.step_s([], 1, 1000) < 0.030
    assert 10_000 < 1 / large.prefill_token_s < 16_000


@pytest.mark.parametrize("name", ["llama-8b-h100", "llama-70b-4xh100", "qwen3-32b-2xh100"])
def test_weights_and_kv_cache_fit_into_the_gpus(name: str) -> None:
    profile = load_profile(name)
    roofline = profile.step
    assert isinstance(roofline, Roofline)
    weights = roofline.model.parameters_billions * 1e9 * roofline.model.bytes_per_parameter
    cache = profile.engine.capacity_tokens * profile.kv.bytes_per_token
    share = (weights + cache) / (roofline.hardware.gpus * GPU_BYTES)
    assert 0.85 < share < 0.92


def test_the_mocker_costs_what_its_own_replay_tells() -> None:
    """TTFT and ITL of single requests, as ai-dynamo-runtime 1.6.1 reports them."""
    cost = load_profile("mocker").cost_model()
    assert isinstance(cost, PolynomialCost)
    assert cost.step_s([PrefillChunk(1000, 0)]) == pytest.approx(0.032105859)
    assert cost.step_s([], 1, 1001) == pytest.approx(0.005791536, rel=1e-6)
    chunks = [PrefillChunk(8192, 0), PrefillChunk(8192, 8192), PrefillChunk(3616, 16384)]
    assert sum(cost.step_s([chunk]) for chunk in chunks) == pytest.approx(0.415183328)


def test_a_path_is_a_profile_too(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert load_profile(str(file)) == load_profile("mocker")


def test_measured_prices_are_taken_as_they_are(text: str) -> None:
    head, tail = text.split("step:\n")
    section = """step:
  kind: linear
  source: measured
  base_ms: 8
  sequence_us: 20
  context_token_ns: 50
  prefill_token_us: 30
  pair_ns: 1
"""
    cost = parse_profile(head + section + tail[tail.index("kv:\n") :], "mine").cost_model()
    assert isinstance(cost, LinearCost)
    assert cost.step_s([PrefillChunk(100, 50)], 2, 30) == pytest.approx(
        8e-3 + 3 * 20e-6 + 30 * 50e-9 + 100 * 30e-6 + 100 * 100.5 * 1e-9
    )


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="no such profile: gpt-5; there are llama-70b-4xh100, "):
        load_profile("gpt-5")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("bytes_per_token: 131072", "bytes_per_tokens: 1", "`bytes_per_tokens`.*at `\\$.kv`"),
        ("bytes_per_token: 131072", "bytes_per_token: 0", ">= 1.*`\\$.kv.bytes_per_token`"),
        ("block_count: 16384", "block_count: many", "`int`, got `str`.*`\\$.engine.block_count`"),
        ("kind: polynomial", "kind: cubic", "'cubic'.*`\\$.step.kind`"),
        ("  block_size: 64\n", "", "missing required field `block_size`"),
        ("gb_per_s: 51", "gb_per_s: 0", "> 0.0.*`\\$.kv.tiers.host.gb_per_s`"),
        ("5.74, 54.01, -25.74", "5.74", "length 3, got 1.*`\\$.step.decode_ms`"),
        ("54.01, -25.74", "51.01, -25.74", "decode_ms falls before x = 1.*`\\$.step`"),
        ("5.74, 54.01", ".nan, 54.01", "`\\$.step.decode_ms\\[0\\]`"),
        ("gb_per_s: 51", "gb_per_s: .inf", "`\\$.kv.tiers.host.gb_per_s`"),
        ("summary:", "summary: [", "mine.yaml: while parsing"),
    ],
)
def test_a_mistake_is_told_by_its_key(text: str, old: str, new: str, told: str) -> None:
    assert old in text
    with pytest.raises(ProfileError, match=told):
        parse_profile(text.replace(old, new), "mine.yaml")


def test_numbers_without_a_source_are_refused(text: str) -> None:
    start = text.index("  source: ai-dynamo-runtime 1.6.1, what")
    end = text.index("  block_size")
    with pytest.raises(ProfileError, match=r"missing required field `source`.*engine"):
        parse_profile(text[:start] + text[end:], "mine.yaml")


def test_a_file_that_is_not_there_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"mine\.yaml"):
        load_profile(str(tmp_path / "mine.yaml"))
