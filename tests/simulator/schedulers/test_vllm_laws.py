"""Laws of vLLM's scheduler through random lives: nothing gets lost, whatever is switched on."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.identity import Tier
from indexer.reference import ReferenceIndex
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.cost_model import Distance, KvTransfer, LinearCost, Link
from simulator.engines.scheduler import RequestRefused, Sequence, Submission
from simulator.schedulers.vllm.config import VllmConfig
from simulator.schedulers.vllm.scheduler import VllmScheduler

SIZE = 4
COST = LinearCost(
    base_s=0.01,
    sequence_s=0.0001,
    context_token_s=1e-6,
    prefill_token_s=1e-4,
    pair_s=1e-7,
    kv=KvTransfer(
        bytes_per_token=1,
        tiers={Tier.HOST: Link(bytes_per_s=1000.0, latency_s=0.002)},
        distances={Distance.RACK: Link(bytes_per_s=500.0, latency_s=0.004)},
    ),
)


class Subscriber:
    """Hears the events, counts copies as a relay does, and tells the oracle."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Tier, int]] = Counter()
        self.index = ReferenceIndex()
        self.slot = self.index.open_slot()

    def hear(self, events: Iterable[PoolEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self._count(event.tier, event.hashes, 1)
                case Removed():
                    self._count(event.tier, event.hashes, -1)
                case Cleared():
                    self.copies.clear()
                    self.index.clear(self.slot)

    def _count(self, tier: Tier, hashes: tuple[int, ...], change: int) -> None:
        for one in hashes:
            self.copies[tier, one] += change
            assert self.copies[tier, one] >= 0
            place = self.index.store if self.copies[tier, one] else self.index.remove
            place(self.slot, tier, np.array([one], np.uint64))

    def check(self, contents: Iterable[tuple[Tier, int]]) -> None:
        """The oracle holds what the engine says it holds."""
        truth = ReferenceIndex()
        slot = truth.open_slot()
        for tier, one in contents:
            truth.store(slot, tier, np.array([one], np.uint64))
        assert self.index.digest(self.slot) == truth.digest(slot)
        assert self.index.count(self.slot) == truth.count(slot)


class Life:
    """One engine, its clients and a subscriber; checks the laws after everything that happens."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.scheduler = VllmScheduler(config)
        self.subscriber = Subscriber()
        self.sequences: list[Sequence] = []
        self.out: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.now_s = 0.0
        self.log: list[Any] = []

    def add(self, submission: Submission) -> None:
        try:
            self.sequences.append(self.scheduler.add(submission, self.now_s))
        except RequestRefused:
            return
        if self.scheduler.step is not None:
            self.scheduler.cut_step(self.now_s)
        self.check()

    def abort(self, index: int) -> None:
        self.scheduler.cut_step(self.now_s)
        for sequence in self.sequences[index : index + 1]:
            self.ends[sequence.request_id] += self.scheduler.abort(sequence)
        self.check()

    def step(self, share: float) -> bool:
        """Goes on: to the end of the step, or `share` of the way when it is a run."""
        scheduler = self.scheduler
        step = scheduler.step or scheduler.begin_step(self.now_s)
        if step is None:
            ready_s = scheduler.next_ready_s
            if ready_s is None:
                assert not scheduler.waiting(), "nothing to do, but somebody waits"
                return False
            assert ready_s > self.now_s
            self.now_s = ready_s
            return True
        self.check_step()
        if step.count > 1 and share < 1:
            self.now_s = max(self.now_s, step.start_s + share * (step.end_s - step.start_s))
            self.hear(scheduler.advance(self.now_s))
            self.check()
            return True
        self.now_s = step.end_s
        self.hear(scheduler.end_step(self.now_s))
        self.subscriber.check(scheduler.contents())
        self.check()
        return True

    def hear(self, result: Any) -> None:
        self.subscriber.hear(result.events)
        self.log.append((self.now_s, result.events))
        for output in result.outputs:
            name = output.sequence.request_id
            assert output.first == output.sequence.prompt_tokens + self.out[name]
            assert output.last > output.first
            self.out[name] += output.last - output.first
            self.ends[name] += output.finished
            self.log.append((name, output.first, output.last))

    def check_step(self) -> None:
        config, scheduled = self.config, self.scheduler.scheduled()
        assert scheduled
        assert sum(tokens for _, tokens in scheduled) <= config.step_tokens_max
        assert all(tokens > 0 for _, tokens in scheduled)
        loras = {one.submission.lora_name for one, _ in scheduled} - {""}
        assert len(loras) <= config.max_loras
        for one, _ in scheduled:
            assert one.submission.ready_s <= self.now_s
            assert one.submission.input_ready_s <= self.now_s

    def check(self) -> None:
        scheduler, size = self.scheduler, self.config.block_size
        running, waiting = scheduler.running(), scheduler.waiting()
        load, blocks = scheduler.load(), scheduler.blocks()
        assert blocks.free + blocks.cached + blocks.in_use == blocks.total
        held = {block for one in [*running, *waiting] for block in one.blocks}
        assert len(held) == blocks.in_use == load.used_blocks
        assert len(running) <= self.config.max_num_seqs
        assert (len(running), len(waiting)) == (load.running, load.waiting)
        assert len({*running, *waiting}) == load.running + load.waiting
        assert len(self.sequences) == load.finished + load.aborted + load.running + load.waiting
        assert sum(one.output_tokens for one in self.sequences) == load.generated_tokens
        assert load.generated_tokens == sum(self.out.values())
        for one in running:
            assert 0 <= one.computed_tokens < one.known_tokens <= one.total_tokens
            assert one.stored_count * size <= one.known_tokens
            assert one.computed_tokens <= len(one.blocks) * size
        assert load.accepted_tokens <= load.drafted_tokens
        assert load.external_hit_tokens <= load.external_queried_tokens

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.step(1.0):
                break
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
        assert all(count == 1 for name, count in self.ends.items())
        assert len(self.ends) == len(self.sequences)


configs = st.builds(
    VllmConfig,
    block_count=st.sampled_from([12, 20, 40]),
    block_size=st.just(SIZE),
    max_num_seqs=st.sampled_from([2, 4]),
    step_tokens_max=st.sampled_from([9, 48, 160]),
    joined_steps_max=st.sampled_from([1, 10_000]),
    cost=st.just(COST),
    lora_names=st.just(("red", "blue", "green")),
    policy=st.sampled_from(["fcfs", "priority"]),
    long_prefill_token_threshold=st.sampled_from([0, 5]),
    scheduler_reserve_full_isl=st.booleans(),
    watermark=st.sampled_from([0.0, 0.2]),
    max_loras=st.sampled_from([1, 2]),
    num_speculative_tokens=st.sampled_from([0, 0, 3]),
    draft_in_cache=st.booleans(),
    host_block_count=st.sampled_from([0, 6, 50]),
    offload_prompt_only=st.booleans(),
)
requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),
        "prompt_tokens": st.integers(1, 60),
        "output_tokens": st.integers(1, 30),
        "priority": st.sampled_from([None, None, -2, 7]),
        "lora_name": st.sampled_from(["", "", "red", "blue", "green"]),
        "wait_s": st.sampled_from([0.0, 0.0, 0.05]),
        "input_wait_s": st.sampled_from([0.0, 0.0, 0.0, 0.1]),
        "remote": st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    }
)
lives = st.lists(
    st.one_of(requests, requests, st.floats(0.05, 1.2), st.integers(0, 12), st.none()), max_size=40
)


def submission(index: int, now_s: float, asked: dict[str, Any]) -> Submission:
    """Equal family and LoRA: the same prompt as far as both reach, and the same answer."""
    told = dict(asked)
    start = 10_000 * (1 + told.pop("family")) + 1000 * len(told["lora_name"])
    remote = told.pop("remote")
    return Submission(
        request_id=f"r{index}",
        content=ChainContent([start + i for i in range(30)], f"r{index}"),
        ready_s=now_s + told.pop("wait_s"),
        input_ready_s=now_s + told.pop("input_wait_s"),
        remote_tokens=int(told["prompt_tokens"] * remote),
        **told,
    )


def live(config: VllmConfig, acts: list[Any]) -> Life:
    life = Life(config)
    for index, act in enumerate(acts):
        match act:
            case dict():
                life.add(submission(index, life.now_s, act))
            case float():
                life.step(act)
            case int():
                life.abort(act)
            case _:
                life.scheduler.reset_prefix_cache()
    life.finish()
    return life


@settings(max_examples=300, deadline=None)
@given(config=configs, acts=lives)
def test_nothing_gets_lost(config: VllmConfig, acts: list[Any]) -> None:
    live(config, acts)


@settings(max_examples=25, deadline=None)
@given(config=configs, acts=lives)
def test_the_same_seed_gives_the_same_log(config: VllmConfig, acts: list[Any]) -> None:
    assert live(config, acts).log == live(config, acts).log
