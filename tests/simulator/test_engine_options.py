"""Engines' limits from profiles, and their own options as text."""

import pytest

from simulator.engines.profile import load_profile, profile_names
from simulator.schedulers import SCHEDULERS
from simulator.schedulers.chitu.task import ChituConfig
from simulator.schedulers.options import scheduler_config
from simulator.schedulers.sglang.config import SglangConfig
from simulator.schedulers.vllm.config import VllmConfig

PROFILE = load_profile("llama-8b-h100")


@pytest.mark.parametrize("engine", SCHEDULERS)
@pytest.mark.parametrize("profile", profile_names())
def test_every_engine_gets_a_config_from_every_profile(engine: str, profile: str) -> None:
    dense = {"max_model_len": "4096", "max_num_seqs": "8"} if engine == "chitu-skew" else {}
    config = scheduler_config(engine, load_profile(profile), block_size=64, options=dense)
    assert config.block_count == load_profile(profile).engine.capacity_tokens // 64
    assert SCHEDULERS[engine].scheduler(config).load().total_blocks == config.block_count


def test_blocks_and_ranks_are_as_asked() -> None:
    config = scheduler_config("chitu-dp", PROFILE, block_size=16, block_count=500, ranks=4)
    assert (config.block_count, config.block_size) == (500, 16)
    assert isinstance(config, ChituConfig)
    assert config.dp_size == 4


def test_an_engines_own_options_are_given_as_text() -> None:
    options = {"policy": "lpm", "conservativeness": "0.3", "mixed_chunk": "true"}
    config = scheduler_config("sglang", PROFILE, block_size=64, options=options)
    assert isinstance(config, SglangConfig)
    assert (config.policy, config.conservativeness, config.mixed_chunk) == ("lpm", 0.3, True)
    cached = scheduler_config("vllm", PROFILE, block_size=64, options={"host_block_count": "9000"})
    assert isinstance(cached, VllmConfig)
    assert cached.host_block_count == 9000
    few = scheduler_config("vllm", PROFILE, block_size=64, options={"max_num_seqs": "4"})
    assert few.max_num_seqs == 4


@pytest.mark.parametrize(
    ("engine", "name", "text", "message"),
    [
        ("vllm", "colour", "red", "vllm has no option 'colour'; there are max_model_len"),
        ("vllm", "policy", "lpm", "policy=lpm: expected one of fcfs, priority"),
        ("sglang", "block_size", "8", "no option 'block_size'"),
        ("sglang", "policy", "best", "policy=best: expected one of fcfs, lpm"),
        ("vllm", "max_num_seqs", "few", "max_num_seqs=few: expected a whole number"),
        ("vllm", "max_num_seqs", "0", "must be at least 1"),
    ],
)
def test_options_that_an_engine_does_not_have_are_refused(
    engine: str, name: str, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler_config(engine, PROFILE, block_size=64, options={name: text})
