"""A kept map as bytes: what was torn or is another's never becomes a ledger."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from events.engine_events import BlocksStored
from events.kept_map import MAGIC, Checkpoint, Source, UnusableMap, pack, unpack
from events.ledger import Ledger
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
        with pytest.raises(UnusableMap):
            unpack(SOURCE, DATA[:length])


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(at=st.integers(0, len(DATA) - 1), flip=st.integers(1, 255))
def test_a_file_with_a_flipped_bit_is_of_no_use(at: int, flip: int) -> None:
    torn = bytearray(DATA)
    torn[at] ^= flip
    with pytest.raises(UnusableMap):
        unpack(SOURCE, bytes(torn))


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(body=st.binary(max_size=200))
def test_whatever_bears_the_checksum_never_raises_anything_else(body: bytes) -> None:
    with pytest.raises(UnusableMap):
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
    with pytest.raises(UnusableMap, match="it is of Source"):
        unpack(other, DATA)


def test_another_version_is_of_no_use() -> None:
    with pytest.raises(UnusableMap, match="kvroute map 2"):
        unpack(SOURCE, DATA.replace(b"map 1", b"map 2"))


def test_rows_that_are_missing_are_noticed() -> None:
    start = len(MAGIC) + 16
    tree = msgspec.msgpack.decode(DATA[start:])
    tree["rows"] = []
    body = msgspec.msgpack.encode(tree)
    with pytest.raises(UnusableMap, match="0 placements, where there were 12"):
        unpack(SOURCE, MAGIC + xxh3_128_digest(body) + body)


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
