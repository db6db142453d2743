"""Changes in, numbered messages out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.plane.facts import (
    TIERS,
    Beat,
    Cleared,
    Epoch,
    FactsMessage,
    Removed,
    Stored,
    decode_stream,
    unpack_hashes,
)
from events.relay.ledger import Change, Gone, Placed, Wiped
from events.relay.outbox import Outbox
from indexer.identity import PrefixHash, Tier

DEVICE, HOST, DISK = Tier
EPOCH = Epoch(1, 2)

Flat = tuple[str, Tier | None, int | None, int | None]
"""One hash of a change or fact: what, tier, the hash before it, the hash."""


def placed(first: int, count: int, parent: int | None = None, tier: Tier = DEVICE) -> Placed:
    before = None if parent is None else PrefixHash(parent)
    return Placed(tier, before, [PrefixHash(i) for i in range(first, first + count)])


def read(messages: list[bytes]) -> list[FactsMessage]:
    decoded = []
    for payload in messages:
        message, dropped = decode_stream(payload)
        assert isinstance(message, FactsMessage)
        assert not dropped
        decoded.append(message)
    return decoded


def flat_changes(changes: list[Change]) -> list[Flat]:
    flat: list[Flat] = []
    for change in changes:
        match change:
            case Placed(tier, parent, hashes):
                pairs = zip([parent, *hashes], hashes, strict=False)
                flat += [("stored", tier, before, one) for before, one in pairs]
            case Gone(tier, hashes):
                flat += [("removed", tier, None, one) for one in hashes]
            case Wiped():
                flat.append(("cleared", None, None, None))
    return flat


def flat_facts(messages: list[FactsMessage]) -> list[Flat]:
    flat: list[Flat] = []
    for message in messages:
        for fact in message.facts:
            match fact:
                case Stored():
                    hashes = unpack_hashes(fact.hashes).tolist()
                    pairs = zip([fact.parent, *hashes], hashes, strict=False)
                    flat += [("stored", TIERS[fact.tier], before, one) for before, one in pairs]
                case Removed():
                    hashes = unpack_hashes(fact.hashes).tolist()
                    flat += [("removed", TIERS[fact.tier], None, one) for one in hashes]
                case Cleared():
                    flat.append(("cleared", None, None, None))
    return flat


def test_nothing_gathered_is_no_message() -> None:
    outbox = Outbox(EPOCH)
    assert outbox.add([], 1.0) == outbox.flush() == []
    assert outbox.seq == 0
    assert outbox.replay(1) == []


def test_changes_gather_into_one_message_that_tells_when_the_first_was_read() -> None:
    outbox = Outbox(EPOCH)
    assert outbox.add([placed(1, 2)], 5.0) == []
    assert outbox.add([Gone(DEVICE, [PrefixHash(2)]), Wiped()], 6.0) == []
    [message] = read(outbox.flush())
    assert (message.seq, message.epoch, message.time_s) == (1, EPOCH, 5.0)
    assert [type(fact) for fact in message.facts] == [Stored, Removed, Cleared]
    outbox.add([Wiped()], 7.0)
    [message] = read(outbox.flush())
    assert (message.seq, message.time_s) == (2, 7.0)


change = st.one_of(
    st.builds(
        placed,
        st.integers(0, 99),
        st.integers(1, 60),
        st.none() | st.integers(0, 99),
        st.sampled_from(Tier),
    ),
    st.builds(
        lambda tier, hashes: Gone(tier, [PrefixHash(one) for one in hashes]),
        st.sampled_from(Tier),
        st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=60),
    ),
    st.just(Wiped()),
)


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(
    rounds=st.lists(st.tuples(st.lists(change, max_size=8), st.booleans()), max_size=6),
    message_bytes=st.integers(1, 600),
)
def test_messages_say_the_changes_in_order_with_numbers_without_a_hole(
    rounds: list[tuple[list[Change], bool]], message_bytes: int
) -> None:
    outbox = Outbox(EPOCH, message_bytes=message_bytes)
    messages: list[bytes] = []
    for changes, flush in rounds:
        messages += outbox.add(changes, 1.0)
        messages += outbox.flush() if flush else []
    messages += outbox.flush()
    decoded = read(messages)
    assert flat_facts(decoded) == flat_changes([one for changes, _ in rounds for one in changes])
    assert [message.seq for message in decoded] == list(range(1, len(messages) + 1))
    assert outbox.seq == len(messages)
    assert outbox.replay(1) == messages
    assert all(len(message) <= max(message_bytes, 64) + 100 for message in messages)


def test_a_beat_speaks_of_the_state_after_the_last_message() -> None:
    outbox = Outbox(EPOCH)
    outbox.add([placed(1, 2)], 1.0)
    with pytest.raises(AssertionError):
        outbox.beat(2, 3, True, 1.0)
    outbox.flush()
    beat, _ = decode_stream(outbox.beat(2, 3, True, 4.0))
    assert beat == Beat(1, EPOCH, 1, 2, 3, True, 4.0)
    assert outbox.seq == 1


def test_the_ring_answers_from_any_number_it_still_has() -> None:
    outbox = Outbox(EPOCH)
    messages = []
    for i in range(5):
        outbox.add([placed(i, 1)], 1.0)
        messages += outbox.flush()
    for from_seq in range(1, 7):
        assert outbox.replay(from_seq) == messages[from_seq - 1 :]
    assert outbox.replay(0) is None
    assert outbox.replay(-3) is None
    assert outbox.replay(7) is None  # a number of another life


def test_the_ring_is_bounded_in_bytes_and_says_what_it_lost() -> None:
    outbox = Outbox(EPOCH, ring_bytes=2000)
    messages = []
    for i in range(100):
        outbox.add([placed(i, 10)], 1.0)
        messages += outbox.flush()
        kept = [one for one in range(1, 102) if outbox.replay(one) is not None]
        assert sum(map(len, outbox.replay(kept[0]) or [])) <= 2000
    first = next(one for one in range(1, 102) if outbox.replay(one) is not None)
    assert first > 50
    assert outbox.replay(first) == messages[first - 1 :]
    assert outbox.replay(first - 1) is None


def test_the_ring_keeps_a_message_that_is_larger_than_itself() -> None:
    outbox = Outbox(EPOCH, ring_bytes=10)
    outbox.add([placed(1, 100)], 1.0)
    messages = outbox.flush()
    assert outbox.replay(1) == messages


def test_another_life_starts_at_1_with_nothing_pending_and_an_empty_ring() -> None:
    outbox = Outbox(EPOCH)
    outbox.add([placed(1, 1)], 1.0)
    outbox.flush()
    outbox.add([placed(2, 1)], 1.0)
    later = Epoch(2, 0)
    outbox.start_over(later)
    assert outbox.flush() == []
    assert outbox.replay(1) == []
    outbox.add([placed(3, 1)], 1.0)
    [message] = read(outbox.flush())
    assert (message.seq, message.epoch) == (1, later)
    assert flat_facts([message]) == [("stored", DEVICE, None, 3)]


@pytest.mark.parametrize("epoch", [EPOCH, Epoch(1, 1), Epoch(0, 9)])
def test_another_life_must_be_a_later_one(epoch: Epoch) -> None:
    with pytest.raises(ValueError, match="is not after"):
        Outbox(EPOCH).start_over(epoch)
