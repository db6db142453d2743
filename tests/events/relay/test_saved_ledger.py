"""A saved ledger as bytes: what was torn or is another's never becomes a ledger."""

from collections.abc import Iterator
from dataclasses import replace
from math import nan
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from events.engines.events import BlocksStored
from events.plane.facts import Epoch, SnapshotRequest
from events.relay.ledger import Ledger
from events.relay.rank import EngineState, Rank
from events.relay.saved_ledger import MAGIC, Checkpoint, Source, UnusableLedger, pack, unpack
from indexer.identity import WorkerKey

SOURCE = Source(WorkerKey("a worker", 3), "vllm", None)
CHECKPOINT = Checkpoint(7, (1 << 64) - 1, True, 1234.5678901, 2345.6)


def a_ledger() -> Ledger:
    ledger = Ledger()
    for chain in range(3):
        tokens = list(range(chain, chain + 64))
        names = tuple(range(10 * chain, 10 * chain + 4))
        ledger.apply(BlocksStored(names, None, tokens, 16, "GPU"))
    return ledger


DATA = pack(SOURCE, CHECKPOINT, a_ledger().copy())


def test_what_was_kept_comes_back() -> None:
    checkpoint, ledger = unpack(SOURCE, DATA)
    assert checkpoint == CHECKPOINT
    assert (ledger.count(), ledger.digest()) == (12, a_ledger().digest())


def test_a_file_that_ends_too_soon_is_of_no_use() -> None:
    for length in range(len(DATA)):
        with pytest.raises(UnusableLedger):
            unpack(SOURCE, DATA[:length])


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(at=st.integers(0, len(DATA) - 1), flip=st.integers(1, 255))
def test_a_file_with_a_flipped_bit_is_of_no_use(at: int, flip: int) -> None:
    torn = bytearray(DATA)
    torn[at] ^= flip
    with pytest.raises(UnusableLedger):
        unpack(SOURCE, bytes(torn))


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(body=st.binary(max_size=200))
def test_whatever_bears_the_checksum_never_raises_anything_else(body: bytes) -> None:
    with pytest.raises(UnusableLedger):
        unpack(SOURCE, MAGIC + xxh3_128_digest(body) + body)


@pytest.mark.parametrize(
    "other",
    [
        replace(SOURCE, worker=WorkerKey("another", 3)),
        replace(SOURCE, worker=WorkerKey("a worker", 2)),
        replace(SOURCE, engine="sglang"),
        replace(SOURCE, wanted_block_size=32),
    ],
)
def test_a_map_of_another_is_of_no_use_and_says_whose_it_is(other: Source) -> None:
    with pytest.raises(UnusableLedger, match="the saved ledger is of Source"):
        unpack(other, DATA)


def test_another_version_is_of_no_use() -> None:
    with pytest.raises(UnusableLedger, match="kvroute ledger 1"):
        unpack(SOURCE, DATA.replace(b"ledger 2", b"ledger 1"))


def test_blocks_that_are_missing_are_noticed() -> None:
    kept = opened(DATA)
    none = Ledger().copy().blocks
    with pytest.raises(UnusableLedger, match="0 placements, of digest 0; its head says 12"):
        unpack(SOURCE, signed(put(kept, ("ledger", "blocks"), none)))


@pytest.mark.parametrize(
    ("known_s", "told_s", "before"),
    [
        (100.0, 100.0, False),
        (100.0, 99.0, True),
        (100.0, 101.0, True),
        (None, 199.0, False),
        (None, 201.0, True),
    ],
)
def test_a_checkpoint_knows_which_process_it_is_of(
    known_s: float | None, told_s: float, before: bool
) -> None:
    checkpoint = Checkpoint(7, 1, True, known_s, 200.0)
    assert checkpoint.is_before(told_s) is before


# What bears a right checksum, and lies


def pages() -> Ledger:
    ledger = Ledger()
    ledger.apply(BlocksStored(tuple(range(1, 21)), None, list(range(80)), 4, "GPU"))
    ledger.apply(BlocksStored((30, 31), 6, list(range(8)), 4, "CPU"))
    ledger.apply(BlocksStored((40,), None, list(range(4)), 4, "GPU", group=1))
    return ledger


def signed(kept: Any) -> bytes:
    body = msgspec.msgpack.encode(kept)
    return MAGIC + xxh3_128_digest(body) + body


def opened(data: bytes) -> Any:
    return msgspec.msgpack.decode(data[len(MAGIC) + 16 :])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in a tree of maps and lists."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = put(copy[path[0]], path[1:], value)
    return copy


KEPT = [opened(pack(SOURCE, CHECKPOINT, one.copy())) for one in (a_ledger(), pages())]
LIES = st.sampled_from(
    [
        *(None, True, 0, 1, -1, 2, 5, 40, 1 << 31, 1 << 62, (1 << 64) - 1, -(1 << 63), 1e300, nan),
        *("x", b"", b"\x01", b"\xff" * 200, [], [0], [-1], [None], [[]], {}, {"a": 1}),
        list(range(20)),
    ]
)


def tried(data: bytes) -> None:
    """Reads a file for a rank, and has the rank do all that a relay asks of it."""
    try:
        checkpoint, ledger = unpack(SOURCE, data)
    except UnusableLedger:
        return
    for has_replay in (True, False):
        rank = Rank("vllm", Epoch(1, 1), has_replay=has_replay)
        rank.resume(checkpoint, unpack(SOURCE, data)[1])
        rank.start()
        rank.beat(2.0)
        rank._believe(checkpoint, unpack(SOURCE, data)[1], 2.0)
        rank.state = EngineState.FOLLOWING
        for event in (
            ["BlockStored", [100, 101], 4, list(range(8)), 4, None, "GPU"],
            ["BlockStored", [100, 101], 3, list(range(32)), 16, None, "GPU"],
            ["BlockRemoved", [*range(1, 45), 100], "GPU"],
            ["BlockRemoved", [*range(1, 45), 100], "CPU"],
        ):
            payload = msgspec.msgpack.encode([1.0, [event], 0])
            rank.on_message(rank._next_seq, payload, 3.0)
            rank.answer(SnapshotRequest(), 3.0)
            rank.beat(4.0)
        kept = rank.kept(5.0)
        assert kept is not None
        pack(SOURCE, *kept)
        rank.on_message(rank._next_seq, msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]]]), 6.0)
    assert ledger.count() >= 0


@settings(deadline=None, max_examples=300)
@given(data=st.data(), kept=st.sampled_from(KEPT), more=st.booleans())
def test_a_file_that_lies_is_of_no_use_or_a_ledger_that_works(
    data: st.DataObject, kept: Any, more: bool
) -> None:
    for _ in range(1 + more):
        path = data.draw(st.sampled_from(list(places(kept))))
        kept = put(kept, path, data.draw(LIES))
    tried(signed(kept))


def lying(kept: Any, *lies: tuple[tuple[Any, ...], Any]) -> bytes:
    """A map with other values, whose count and digest agree with them as far as can be."""
    for path, value in lies:
        kept = put(kept, path, value)
    return signed(kept)


@pytest.mark.parametrize(
    ("kept", "path", "value"),
    [
        (0, ("ledger", "engine_block_size"), 0),
        (0, ("ledger", "engine_block_size"), -16),
        (0, ("ledger", "groups"), list(range(1000))),
        (0, ("checkpoint", "seq"), -1),
        (0, ("checkpoint", "seq"), 1 << 63),
        (0, ("checkpoint", "digest"), -1),
        (0, ("checkpoint", "taken_at_s"), nan),
        (0, ("ledger", "blocks"), b"\x02" + b"\xff" * 1000),
        (1, ("ledger", "blocks"), [1, 2]),
    ],
)
def test_numbers_that_none_can_be_make_a_file_of_no_use(
    kept: int, path: tuple[Any, ...], value: Any
) -> None:
    with pytest.raises(UnusableLedger):
        unpack(SOURCE, lying(KEPT[kept], (path, value)))


@settings(deadline=None, max_examples=300)
@given(kept=st.sampled_from(KEPT), at=st.integers(0), value=st.integers(0, 255))
def test_blocks_with_another_byte_are_of_no_use_or_a_ledger_that_works(
    kept: Any, at: int, value: int
) -> None:
    blocks = bytearray(kept["ledger"]["blocks"])
    blocks[at % len(blocks)] = value
    tried(signed(put(kept, ("ledger", "blocks"), bytes(blocks))))
