"""The scheduler by example: hashes, reuse, resets, aborts, joined steps. Order, budgets and
preemption are held against vLLM's own in test_vllm_against_recording.py."""

from typing import Any

import numpy as np
import pytest

from simulator.engines.block_pool import Cleared, Stored
from simulator.engines.content import TokenContent, add_tokens
from simulator.engines.scheduler import RequestRefused, SchedulerConfig, Sequence, TokenArray
from simulator.schedulers import SCHEDULERS
from simulator.schedulers.vllm.scheduler import VllmScheduler
from tests.simulator.schedulers.lives import begin, step


def prompt(token_count: int, first: int = 0) -> TokenArray:
    return np.arange(first, first + token_count, dtype=np.uint32)


def make(**limits: Any) -> VllmScheduler:
    return VllmScheduler(SchedulerConfig(**({"block_count": 64, "block_size": 4} | limits)))


def _answer_of(sequence: Sequence) -> list[int]:
    assert isinstance(sequence.content, TokenContent)
    return sequence.content.token_ids.tolist()


def finish(scheduler: VllmScheduler, now_s: float = 0.0) -> tuple[list[Any], float]:
    """Runs until idle; returns all events and the time."""
    events: list[Any] = []
    while step := scheduler.begin_step(now_s):
        now_s = step.end_s
        events += scheduler.end_step(now_s).events
    return events, now_s


def stored_hashes(events: list[Any]) -> list[int]:
    return [one for event in events if isinstance(event, Stored) for one in event.hashes]


def test_an_answer_fills_blocks_too_but_its_last_token_is_never_computed() -> None:
    scheduler = make()
    add_tokens(scheduler, prompt(6), 6, 0.0)  # 12 tokens known in the end, 11 computed
    events, _ = finish(scheduler)
    assert len(stored_hashes(events)) == 2
    add_tokens(scheduler, prompt(6, first=100), 7, 0.0)
    events, _ = finish(scheduler)
    assert len(stored_hashes(events)) == 3


def test_the_second_request_reuses_the_first_ones_blocks_and_is_told_so() -> None:
    scheduler = make()
    add_tokens(scheduler, prompt(16), 1, 0.0)
    first, _ = finish(scheduler)
    again = add_tokens(scheduler, prompt(16), 1, 0.0)
    second, _ = finish(scheduler)
    assert again.cached_tokens == 12
    assert stored_hashes(second) == stored_hashes(first)[3:]
    assert scheduler.load().prefix_hit_tokens == 12
    assert scheduler.load().prefix_queried_tokens == 32


def test_engine_hashes_depend_on_seed_salt_and_lora_and_keys_are_told_like_vllms() -> None:
    def told(seed: int = 0, salt: str = "", lora: str = "") -> Stored:
        scheduler = make(hash_seed=seed, lora_names=("x", "ad"))
        add_tokens(scheduler, prompt(8), 1, 0.0, cache_salt=salt, lora_name=lora)
        events, _ = finish(scheduler)
        return events[0]  # type: ignore[no-any-return]

    variants = [told(), told(seed=1), told(salt="s"), told(lora="ad"), told(salt="s", lora="ad")]
    assert len({one for event in variants for one in event.hashes}) == 10
    assert all(0 <= one < 1 << 64 for event in variants for one in event.hashes)
    assert told().hashes == told().hashes
    assert told(salt="s").extra_keys == (("s",), None)
    assert told(lora="ad", salt="s").extra_keys == (("ad", "s"), ("ad",))
    assert (told(lora="ad").lora_name, told(lora="ad").lora_id) == ("ad", 2)


def test_the_same_prompt_gets_the_same_answer_on_every_engine() -> None:
    one, other = make(hash_seed=1), make(hash_seed=2)
    answers = [_answer_of(add_tokens(each, prompt(9), 5, 0.0)) for each in (one, other)]
    assert answers[0] == answers[1]


def test_a_reset_is_told_with_the_next_steps_events() -> None:
    scheduler = make()
    add_tokens(scheduler, prompt(8), 1, 0.0)
    scheduler.begin_step(0.0)
    assert not scheduler.reset_prefix_cache()
    scheduler.end_step(0.1)
    assert scheduler.reset_prefix_cache()
    assert scheduler.begin_step(1.0) is None
    add_tokens(scheduler, prompt(8), 1, 1.0)
    events, _ = finish(scheduler, 1.0)
    assert [type(event) for event in events] == [Cleared, Stored]


def test_aborted_requests_give_their_blocks_back_wherever_they_stand() -> None:
    scheduler = make(max_num_seqs=1)
    running = add_tokens(scheduler, prompt(8), 5, 0.0)
    waiting = add_tokens(scheduler, prompt(8), 5, 0.0)
    scheduler.begin_step(0.0)
    assert scheduler.abort(waiting)
    assert scheduler.abort(running)
    assert not scheduler.abort(running)
    assert scheduler.end_step(0.1).outputs == []
    assert scheduler.pool.in_use_count == 0
    assert scheduler.load().aborted == 2
    assert scheduler.begin_step(0.2) is None


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
    tokens: int, max_tokens: int, lora: str, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        add_tokens(make(), prompt(tokens), max_tokens, 0.0, lora_name=lora)


def test_a_model_longer_than_the_pool_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="exceeds the pool"):
        SchedulerConfig(block_count=2, block_size=16, max_model_len=33)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chitu"])
def test_steps_out_of_order_are_our_own_mistake(engine: str) -> None:
    scheduler = SCHEDULERS[engine].scheduler(SchedulerConfig(block_count=64, block_size=4))
    with pytest.raises(RuntimeError, match="no step"):
        scheduler.end_step(0.0)
    add_tokens(scheduler, prompt(4), 1, 0.0)
    scheduler.begin_step(0.0)
    with pytest.raises(RuntimeError, match="going on"):
        scheduler.begin_step(0.0)


def test_a_newcomer_cuts_joined_steps_at_the_end_of_the_one_going_on() -> None:
    scheduler = make(joined_steps_max=16)
    sequence = add_tokens(scheduler, prompt(4), 30, 0.0)
    run = begin(scheduler, step(scheduler))
    assert run.count == 16
    single_s = (run.end_s - run.start_s) / run.count
    cut = scheduler.cut_step(run.start_s + 2.5 * single_s)
    assert cut is not None
    assert cut.count == 3
    assert cut.end_s == pytest.approx(run.start_s + 3 * single_s, rel=1e-4)
    scheduler.end_step(cut.end_s)
    assert sequence.output_tokens == 4
