"""The virtual relay: what it tells, applied in order, is what the engine's events add up to."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from events.plane.facts import (
    TIERS,
    Cleared,
    FactsMessage,
    Removed,
    Stored,
    decode_stream,
    unpack_hashes,
)
from indexer.identity import Tier, WorkerKey
from indexer.reference import ReferenceIndex
from simulator.engines import block_pool
from simulator.engines.block_pool import PoolEvent
from simulator.engines.scheduler import SchedulerConfig
from simulator.world.virtual_relay import VirtualRelay

CONFIG = SchedulerConfig(block_count=64, block_size=16)


def new_relay() -> VirtualRelay:
    return VirtualRelay(WorkerKey("w", 0), CONFIG, 0.0, engine="vllm")


def stored(*hashes: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> PoolEvent:
    return block_pool.Stored(hashes, parent, (), (), tier=tier)


def removed(*hashes: int, tier: Tier = Tier.DEVICE) -> PoolEvent:
    return block_pool.Removed(hashes, tier=tier)


def told(messages: list[bytes]) -> list[Stored | Removed | Cleared]:
    facts: list[Stored | Removed | Cleared] = []
    for payload in messages:
        message, dropped = decode_stream(payload)
        assert isinstance(message, FactsMessage)
        assert not dropped
        facts += message.facts
    return facts


@st.composite
def batches(draw: st.DrawFn) -> list[list[PoolEvent]]:
    """What an engine could tell: chains stored on two tiers, copies removed that are there."""
    copies: Counter[tuple[Tier, int]] = Counter()
    made: list[list[PoolEvent]] = []
    for _ in range(draw(st.integers(1, 12))):
        batch: list[PoolEvent] = []
        for _ in range(draw(st.integers(0, 5))):
            tier = draw(st.sampled_from([Tier.DEVICE, Tier.HOST]))
            kind = draw(st.sampled_from(["store", "store", "remove", "clear"]))
            there = sorted(one for (at, one), count in copies.items() if at is tier and count)
            if kind == "store":
                hashes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6, unique=True))
                copies.update((tier, one) for one in hashes)
                batch.append(stored(*hashes, tier=tier))
            elif kind == "remove" and there:
                hashes = draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
                copies.subtract((tier, one) for one in hashes)
                batch.append(removed(*hashes, tier=tier))
            elif kind == "clear" and draw(st.integers(0, 9)) == 0:
                copies.clear()
                batch.append(block_pool.Cleared())
        made.append(batch)
    return made


@given(batches())
@settings(max_examples=200, deadline=None)
def test_what_is_told_is_what_the_events_add_up_to(of: list[list[PoolEvent]]) -> None:
    relay, index = new_relay(), ReferenceIndex()
    slot = index.open_slot()
    copies: Counter[tuple[Tier, int]] = Counter()
    for batch in of:
        for event in batch:
            match event:
                case block_pool.Stored():
                    copies.update((event.tier, one) for one in event.hashes)
                case block_pool.Removed():
                    copies.subtract((event.tier, one) for one in event.hashes)
                case block_pool.Cleared():
                    copies.clear()
        for fact in told(relay.tell(batch, 1.0)):
            match fact:
                case Stored():  # nothing is told twice
                    hashes = unpack_hashes(fact.hashes)
                    assert index.store(slot, TIERS[fact.tier], hashes) == len(hashes)
                case Removed():
                    hashes = unpack_hashes(fact.hashes)
                    assert index.remove(slot, TIERS[fact.tier], hashes) == len(hashes)
                case Cleared():
                    index.clear(slot)
        there = {one for one, count in copies.items() if count}
        assert there == {(tier, one) for tier in Tier for one in relay.held.held(tier).tolist()}
        assert index.count(slot) == relay.held.count() == len(there)
        assert index.digest(slot) == relay.held.digest()


def test_a_chain_goes_on_after_the_blocks_that_were_known() -> None:
    relay = new_relay()
    relay.tell([stored(1, 2)], 0.0)
    facts = told(relay.tell([stored(1, 2, 3, 4)], 1.0))
    (fact,) = facts
    assert isinstance(fact, Stored)
    assert unpack_hashes(fact.hashes).tolist() == [3, 4]
    assert fact.parent == 2


def test_removals_in_a_row_are_one_fact() -> None:
    relay = new_relay()
    relay.tell([stored(1, 2, 3)], 0.0)
    assert len(told(relay.tell([removed(3), removed(2), removed(1)], 1.0))) == 1


def test_a_relay_that_forgot_its_map_ignores_removals_of_what_it_never_heard_of() -> None:
    relay = new_relay()
    relay.tell([stored(1, 2)], 0.0)
    relay.on_restart(2.0, keeps_map=False)
    assert relay.tell([removed(2)], 3.0) == []
    assert not relay.complete
    assert relay.held.count() == 0


def test_two_lives_at_one_instant_have_different_epochs() -> None:
    relay = new_relay()
    first = relay.outbox.epoch
    relay.on_engine_restart(0.0)
    relay.on_restart(0.0, keeps_map=True)
    assert relay.outbox.epoch > first
    assert relay.outbox.seq == 1


def test_an_engine_without_events_tells_nothing() -> None:
    relay = VirtualRelay(WorkerKey("w", 0), CONFIG, 0.0, engine="vllm", tells_events=False)
    assert relay.tell([stored(1, 2)], 1.0) == []
    assert relay.held.count() == 0
