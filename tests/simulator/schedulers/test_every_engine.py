"""What all engines have in common: hashes of tokens, answers, refusals."""

import numpy as np
import pytest

from simulator.engines.block_pool import Stored
from simulator.engines.content import TokenContent, add_tokens, token_submission
from simulator.engines.scheduler import RequestRefused, SchedulerConfig, TokenArray
from simulator.schedulers import SCHEDULERS


def prompt(token_count: int) -> TokenArray:
    return np.arange(token_count, dtype=np.uint32)


def config_of(seed: int) -> SchedulerConfig:
    return SchedulerConfig(block_count=64, block_size=4, lora_names=("x", "ad"), hash_seed=seed)


def test_engine_hashes_depend_on_seed_salt_and_lora_and_keys_are_told_like_vllms() -> None:
    def told(seed: int = 0, salt: str = "", lora: str = "") -> Stored:
        content = TokenContent(prompt(8), config_of(seed), cache_salt=salt, lora_name=lora)
        return content.stored(0, 2)

    variants = [told(), told(seed=1), told(salt="s"), told(lora="ad"), told(salt="s", lora="ad")]
    assert len({one for event in variants for one in event.hashes}) == 10
    assert all(0 <= one < 1 << 64 for event in variants for one in event.hashes)
    assert told().hashes == told().hashes
    assert told(salt="s").extra_keys == (("s",), None)
    assert told(lora="ad", salt="s").extra_keys == (("ad", "s"), ("ad",))
    assert (told(lora="ad").lora_name, told(lora="ad").lora_id) == ("ad", 2)


def test_the_same_prompt_gets_the_same_answer_on_every_engine() -> None:
    (_, one), (_, other) = (token_submission(prompt(9), 5, config_of(seed)) for seed in (1, 2))
    assert one.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chitu"])
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "lora", "message"),
    [
        (0, 1, "", "empty"),
        (4, 0, "", "max_tokens"),
        (250, 7, "", "maximum length is 256"),
        (4, 1, "nobody", "no such LoRA"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    engine: str, tokens: int, max_tokens: int, lora: str, message: str
) -> None:
    scheduler = SCHEDULERS[engine].scheduler(config_of(0))
    with pytest.raises(RequestRefused, match=message):
        add_tokens(scheduler, prompt(tokens), max_tokens, 0.0, lora_name=lora)


@pytest.mark.parametrize("tokens", [4, 300])
def test_no_more_of_an_answer_is_made_than_a_model_is_long(tokens: int) -> None:
    lengths = []

    def answer(prompt: TokenArray, max_tokens: int, lora_name: str) -> TokenArray:
        lengths.append(max_tokens)
        return prompt[:0]

    scheduler = SCHEDULERS["vllm"].scheduler(config_of(0))
    with pytest.raises(RequestRefused, match="maximum length is 256"):
        add_tokens(scheduler, prompt(tokens), 1 << 70, 0.0, answer)
    assert lengths == [max(256 - tokens, 0)]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chitu"])
def test_steps_out_of_order_are_our_own_mistake(engine: str) -> None:
    scheduler = SCHEDULERS[engine].scheduler(config_of(0))
    with pytest.raises(RuntimeError, match="no step"):
        scheduler.end_step(0.0)
    add_tokens(scheduler, prompt(4), 1, 0.0)
    scheduler.begin_step(0.0)
    with pytest.raises(RuntimeError, match="going on"):
        scheduler.begin_step(0.0)
