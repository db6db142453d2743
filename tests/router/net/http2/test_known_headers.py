"""Header blocks that were decoded before, beside a decoder that keeps nothing."""

import random

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hpack.hpack import NeverIndexedHeaderTuple

from router.net.http2.known_headers import (
    BLOCK_MAX,
    DECODED_MAX,
    DECODED_WORK_SHIFT,
    FIELDS_WORK_SHIFT,
    KNOWN_MAX,
    SIZES_MAX,
    KnownHeaders,
    keeps_table,
)
from router.net.http2.requests import Head

SEED = 20261123
NAMES = [":path", "te", "grpc-timeout", "authorization", "x-request-id", "user-agent"]


def fields_of(head: Head | None) -> list[tuple[str, str]] | None:
    return None if head is None else list(head.fields)


def test_blocks_mean_what_they_mean_to_a_decoder_that_keeps_nothing() -> None:
    rng = random.Random(SEED)
    encoder, beside, known = Encoder(), Decoder(), KnownHeaders(1 << 16, 1 << 16)
    kept = 0
    lists = [
        [
            (NeverIndexedHeaderTuple(name, value) if rng.random() < 0.3 else (name, value))
            for name in rng.sample(NAMES, rng.randint(1, 5))
            for value in [str(rng.randrange(3)) * rng.choice((1, 5, 140))]
        ]
        for _ in range(8)
    ]
    for _ in range(3000):
        if rng.random() < 0.02:
            encoder.header_table_size = rng.choice((0, 100, 4096))
        fields = rng.choice(lists)
        block = encoder.encode(fields, huffman=rng.random() < 0.5)
        kept += block in known._known
        assert fields_of(known.read(block)) == list(map(tuple, beside.decode(block)))
        assert len(known._known) <= KNOWN_MAX
    assert kept > 300


def test_a_block_that_is_known_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, known = Encoder(), KnownHeaders(1000, 1000)
    for _ in range(2):  # the second block's fields are all in the table
        block = encoder.encode([("te", "trailers"), ("x", "y")])
        headers = known.read(block)
    monkeypatch.setattr(known._decoder, "decode", None)
    assert known.read(block) is headers
    assert fields_of(headers) == [("te", "trailers"), ("x", "y")]


def test_known_blocks_are_bounded() -> None:
    known = KnownHeaders(1 << 16, 1 << 16)
    for i in range(3 * KNOWN_MAX):
        known.read(b"\x00\x01x" + bytes((len(str(i)),)) + str(i).encode())
        assert len(known._known) <= KNOWN_MAX
    known._known.clear()
    known.read(
        b"\x00\x01x\x7f"
        + bytes((0x80 | (BLOCK_MAX & 0x7F), BLOCK_MAX >> 7))
        + b"y" * (BLOCK_MAX + 127)
    )
    assert not known._known


def test_too_many_fields_are_none_and_far_too_many_an_error() -> None:
    known = KnownHeaders(200, 400)
    assert known.read(Encoder().encode([("x", "y" * 200)], huffman=False)) is None
    assert fields_of(known.read(Encoder().encode([("x", "y")]))) == [("x", "y")]
    with pytest.raises(HPACKError):
        known.read(Encoder().encode([("x", "y" * 400)], huffman=False))


@pytest.mark.parametrize(
    ("block", "keeps"),
    [
        (b"", True),
        (b"\x82\x86", True),
        (b"\xff\x80\x01", True),
        (b"\x00\x01a\x01b", True),
        (b"\x10\x01a\x01b", True),
        (b"\x0f\x10\x01b", True),
        (b"\x40\x01a\x01b", False),
        (b"\x82\x41\x01b", False),
        (b"\x20", False),
        (b"\x00\x01a\x05b", False),
        (b"\x00\x01", False),
        (b"\x00", False),
        (b"\xff\x80", False),
    ],
)
def test_what_leaves_the_table_as_it_is(block: bytes, keeps: bool) -> None:
    assert keeps_table(block) is keeps


def test_random_bytes_are_read_to_an_end() -> None:
    rng = random.Random(SEED)
    for _ in range(5000):
        block = rng.randbytes(rng.randint(0, 40))
        keeps_table(block)
        known, beside = KnownHeaders(1 << 12, 1 << 12), Decoder(max_header_list_size=1 << 12)
        try:
            decoded = list(beside.decode(block, raw=True))
        except HPACKError:
            with pytest.raises(HPACKError):
                known.read(block)
            continue
        expected = [
            (str(name, errors="replace"), str(value, errors="replace").strip(" \t"))
            for name, value in decoded
        ]
        head = known.read(block)
        assert fields_of(head) == expected
        if keeps_table(block):
            assert known.read(block) is head


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_the_table_are_few(seed: int) -> None:
    rng = random.Random(seed)
    known = KnownHeaders(1 << 16, 1 << 16)
    sizes = [rng.choice((b"\x20", b"\x3f\xe1\x1f", b"\x3e")) for _ in range(rng.randint(0, 4))]
    block = b"".join(sizes) + b"\x82"
    if len(sizes) > SIZES_MAX:
        with pytest.raises(HPACKError, match="size of the table"):
            known.read(block * rng.randint(1, 1000))
    else:
        assert fields_of(known.read(block)) == [(":method", "GET")]


def test_decoding_is_work_and_knowing_is_none() -> None:
    known = KnownHeaders(1 << 16, 1 << 16)
    block = b"\x00\x01a\x01b" * 100
    known.read(block)
    assert known.work == (len(block) >> DECODED_WORK_SHIFT) + (34 * 100 >> FIELDS_WORK_SHIFT)
    known.read(block)
    assert known.work == 0


def test_each_value_of_a_bin_field_counts_as_a_field() -> None:
    """However few bytes of a block name them, by the dynamic table."""
    encoder, known = Encoder(), KnownHeaders(1 << 16, 1 << 16)
    field = ("x-bin", "," * 100)
    size = len("".join(field)) + 32 + 100 * (len("x-bin") + 32)
    known.read(encoder.encode([field]))
    head = known.read(encoder.encode([field, field]))
    assert head is not None
    assert head.size == 2 * size
    assert len(head.metadata or ()) == 2 * 101
    work = known.work
    block = encoder.encode([field] * 10)
    assert len(block) == 10
    assert known.read(block) is not None
    assert known.work >= 5 * work, "the work is that of the fields"
    few = KnownHeaders(size, 1 << 16)
    assert few.read(Encoder().encode([field])) is not None
    assert few.read(Encoder().encode([field, ("x", "")])) is None


def test_kept_fields_are_small() -> None:
    encoder, known = Encoder(), KnownHeaders(1 << 16, 1 << 16)
    field = ("x", "y" * 479)
    for count in range(1, 12):
        known.read(encoder.encode([field] * count))
    assert [head.size for head in known._known.values()] == [
        512 * count for count in range(2, DECODED_MAX // 512 + 1)
    ]
