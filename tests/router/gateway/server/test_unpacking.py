"""Packed bodies: every coding, whole, split anywhere, cut, spoiled, and as bombs."""

import gzip
import random
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from router.gateway.refusals import GatewayRefusal
from router.gateway.server.unpacking import (
    ENCODINGS,
    FRAMES_MAX,
    PIECE_BYTES,
    STEP_BYTES,
    CannotUnpack,
    Unpacker,
    encoding_of,
    zstd_library,
)

zstd = zstd_library()


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip, two members": ("gzip", lambda c: gzip.compress(c[:7]) + gzip.compress(c[7:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without zlib's header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "zstd, two frames": ("zstd", lambda c: zstd.compress(c[:7]) + zstd.compress(c[7:])),
    "zstd, level 19": ("zstd", lambda c: zstd.compress(c, level=19)),
}
packers = pytest.mark.parametrize("packer", PACKERS)


def pieces(content: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The content, cut at these places."""
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [content[a:b] for a, b in pairwise(places)]


def unpacked(encoding: str, parts: Iterable[bytes]) -> bytes:
    unpacker, got = Unpacker(encoding), bytearray()
    for part in parts:
        for given_now in unpacker.steps(part):
            assert len(given_now) <= STEP_BYTES
            got += given_now
    unpacker.end()
    return bytes(got)


def outcome(encoding: str, parts: Iterable[bytes]) -> bytes | CannotUnpack:
    """The body, or why there is none."""
    try:
        return unpacked(encoding, parts)
    except CannotUnpack as error:
        return error


def bomb(encoding: str, size: int) -> bytes:
    packer = {
        "gzip": zlib.compressobj(9, wbits=31),
        "deflate": zlib.compressobj(9),
        "zstd": zstd.ZstdCompressor(),
    }[encoding]
    block = bytes(1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(size >> 20)), packer.flush()])


@packers
@given(
    content=st.binary(max_size=4096) | st.integers(1, 300_000).map(lambda n: b"ab" * n),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=8),
)
def test_a_body_is_unpacked_wherever_it_is_split(
    packer: str, content: bytes, cuts: list[int]
) -> None:
    encoding, pack = PACKERS[packer]
    assert unpacked(encoding, pieces(pack(content), cuts)) == content


@packers
def test_byte_by_byte(packer: str) -> None:
    encoding, pack = PACKERS[packer]
    content = random.Random(7).randbytes(500) * 3
    assert unpacked(encoding, [bytes([byte]) for byte in pack(content)]) == content


@packers
@given(data=st.data())
def test_a_body_that_ends_early_is_none(packer: str, data: st.DataObject) -> None:
    encoding, pack = PACKERS[packer]
    packed = pack(bytes(range(256)))
    got = outcome(encoding, [packed[: data.draw(st.integers(1, len(packed) - 1))]])
    if isinstance(got, bytes):
        assert "two" in packer, "a part of one frame passes for a whole body"
        assert got == bytes(range(7)), "at the end of the first of two frames, a body may end"


@packers
@given(data=st.data())
def test_spoiled_bytes_raise_that_and_nothing_else(packer: str, data: st.DataObject) -> None:
    encoding, pack = PACKERS[packer]
    packed = bytearray(pack(b"hello " * 100))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    got = outcome(encoding, pieces(bytes(packed), data.draw(st.lists(st.integers(0, 999)))))
    assert isinstance(got, bytes) or encoding in str(got)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(noise=st.binary(min_size=1, max_size=2000))
def test_noise_raises_that_and_nothing_else(encoding: str, noise: bytes) -> None:
    got = outcome(encoding, [noise])
    assert isinstance(got, bytes) or encoding in str(got)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("cuts", [(), range(0, 1 << 20, 100)])
def test_a_bomb_comes_a_step_at_a_time(encoding: str, cuts: Iterable[int]) -> None:
    size = 64 << 20
    packed = bomb(encoding, size)
    assert len(packed) < size // 500
    got = steps = 0
    unpacker = Unpacker(encoding)
    for part in pieces(packed, cuts):
        for step in unpacker.steps(part):
            assert len(step) <= STEP_BYTES
            got += len(step)
            steps += 1
    unpacker.end()
    assert got == size
    assert steps < size // STEP_BYTES + 2 * len(packed) // PIECE_BYTES + 2 * len(cuts or ()) + 20


@pytest.mark.parametrize(
    ("encoding", "frame"),
    [
        ("gzip", gzip.compress(b"", mtime=0)),
        ("zstd", zstd.compress(b"")),
        ("zstd", b"\x50\x2a\x4d\x18\0\0\0\0"),  # a frame to be skipped
    ],
)
def test_frames_of_nothing_have_a_bound(encoding: str, frame: bytes) -> None:
    assert unpacked(encoding, [frame * 3]) == b""
    with pytest.raises(CannotUnpack, match="after the end"):
        unpacked(encoding, [frame * (FRAMES_MAX + 1)])


def test_deflate_is_one_stream() -> None:
    with pytest.raises(CannotUnpack, match="after the end"):
        unpacked("deflate", [zlib.compress(b"a") * 2])


def test_a_window_that_no_http_client_uses_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 24}
    packer = zstd.ZstdCompressor(options=options)
    packed = packer.compress(random.Random(1).randbytes(1 << 10)) + packer.flush()
    with pytest.raises(CannotUnpack, match="zstd"):
        unpacked("zstd", [packed])


@pytest.mark.parametrize(
    ("headers", "encoding"),
    [
        ((), ""),
        (("identity",), ""),
        (("",), ""),
        (("gzip",), "gzip"),
        ((" GZIP ",), "gzip"),
        (("x-gzip",), "gzip"),
        (("deflate",), "deflate"),
        (("Zstd",), "zstd"),
    ],
)
def test_codings_that_are_taken(headers: tuple[str, ...], encoding: str) -> None:
    named = CIMultiDict([("Content-Encoding", value) for value in headers])
    assert encoding_of(named) == encoding


@given(st.lists(st.text() | st.sampled_from(["gzip", "br", "\udcff", "zstd"]), min_size=1))
def test_every_other_coding_is_named_with_those_that_are_taken(values: list[str]) -> None:
    named = CIMultiDict([("Content-Encoding", value) for value in values])
    try:
        got: str | GatewayRefusal = encoding_of(named)
    except GatewayRefusal as refusal:
        got = refusal
    if isinstance(got, str):
        assert got in ("", *ENCODINGS)
    else:
        assert got.reason == "UNSUPPORTED_ENCODING"
        assert "zstd, gzip, deflate" in got.message
        assert len(got.message) < 1000
