"""The small HTTP/2: frames in, calls and frames out."""

import gzip
import random
import struct
import zlib
from collections.abc import Callable

import pytest

from router.net.http2 import frames as http2
from router.net.http2.frames import Code, ConnectionFault, Status, frame
from router.net.http2.machine import Connection
from router.net.http2.packing import STEP_BYTES, unpacking
from router.net.listener.held import STREAM_BYTES
from tests.router.net.http2.peer import HEADERS, Echo, Peer, a_peer, data, message, reset, status_of

U32 = struct.Struct(">I")
CREDIT = (http2.WINDOW_UPDATE, 1)


def test_a_call_from_its_headers_to_its_trailers() -> None:
    peer = a_peer()
    assert peer.send(peer.headers(1)) == []
    assert peer.echo.opens[0][0] == "/a/B"
    (opening, answer) = peer.send(data(1, message(b"hello")))
    assert opening[:3] == (http2.HEADERS, http2.END_HEADERS, 1)
    assert answer == (http2.DATA, 0, 1, message(b"hello"))
    (last,) = peer.send(data(1, b"", http2.END_STREAM))
    assert last[:3] == (http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1)
    assert b"grpc-status" in last[3]
    assert peer.connection.streams == {}
    assert peer.echo.ends == ["half_closed"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_bytes_may_come_in_any_pieces(size: int) -> None:
    peer = a_peer()
    sent = [b"", b"x", b"y" * 500, b"z" * 70_000]
    content = b"".join(message(each) for each in sent)
    frames = [peer.headers(1)]
    frames += [data(1, content[at : at + 9999]) for at in range(0, len(content), 9999)]
    everything = b"".join(frames)
    back = []
    for at in range(0, len(everything), size):
        back += peer.send(everything[at : at + size])
    assert peer.echo.messages == sent
    answered = b"".join(payload for kind, _, _, payload in back if kind == http2.DATA)
    waiting = bytes(peer.connection.streams[1].waiting)
    assert answered + waiting == content


def test_padding_and_priority_are_taken_off() -> None:
    peer = a_peer()
    block = peer.encoder.encode(HEADERS)
    padded = bytes((3,)) + bytes(5) + block + bytes(3)
    flags = http2.PADDED | http2.HAS_PRIORITY | http2.END_HEADERS
    peer.send(frame(http2.HEADERS, flags, 1, padded))
    peer.send(frame(http2.DATA, http2.PADDED, 1, bytes((2,)) + message(b"in") + bytes(2)))
    assert peer.echo.messages == [b"in"]


def test_headers_may_go_on_in_further_frames() -> None:
    peer = a_peer()
    block = peer.encoder.encode(HEADERS)
    peer.send(
        frame(http2.HEADERS, 0, 1, block[:3]),
        frame(http2.CONTINUATION, 0, 1, block[3:5]),
        frame(http2.CONTINUATION, http2.END_HEADERS, 1, block[5:]),
    )
    assert peer.echo.opens[0][0] == "/a/B"


def test_a_peer_without_room_gets_its_bytes_later() -> None:
    peer = a_peer()
    peer.send(peer.headers(1))
    for _ in range(10):
        peer.send(data(1, message(b"a" * 16_000)))
    stream = peer.connection.streams[1]
    assert len(stream.waiting) == 160_050 - 65_535
    assert peer.connection.waiting_bytes == len(stream.waiting)
    back = peer.send(frame(http2.WINDOW_UPDATE, 0, 1, U32.pack(1 << 20)))
    assert back == []  # the connection has none, either
    back = peer.send(frame(http2.WINDOW_UPDATE, 0, 0, U32.pack(1 << 20)))
    assert sum(len(payload) for _, _, _, payload in back) == 160_050 - 65_535
    assert peer.connection.waiting_bytes == 0


def test_a_peer_that_does_not_read_gets_no_credit() -> None:
    peer = a_peer()
    peer.send(peer.headers(1))
    part = data(1, message(b"a" * 16_000))
    back = [sent for _ in range(100) for sent in peer.send(part)]
    given = [payload for kind, _, number, payload in back if (kind, number) == CREDIT]
    assert sum(U32.unpack(each)[0] for each in given) <= http2.STREAM_WAITING_MAX + 65_535
    assert given
    most = 0
    while peer.connection.streams:
        most = len(peer.connection.streams[1].waiting)
        *_, last = [*back, *peer.send(part)]
    assert last == reset(1, Code.FLOW_CONTROL_ERROR)
    assert most <= http2.STREAM_WAITING_MAX + http2.STREAM_WINDOW
    assert peer.connection.held.bytes == peer.connection.waiting_bytes == 0


def test_a_reset_ends_the_call() -> None:
    peer = a_peer()
    peer.send(peer.headers(1))
    peer.send(frame(http2.RST_STREAM, 0, 1, U32.pack(8)))
    assert peer.echo.ends == ["reset"]
    assert peer.connection.streams == {}
    assert peer.send(data(1, message(b"late"))) == [reset(1, Code.STREAM_CLOSED)]


def test_a_lost_connection_ends_all_calls() -> None:
    peer = a_peer()
    peer.send(peer.headers(1), peer.headers(3))
    peer.connection.lost()
    assert peer.echo.ends == ["reset", "reset"]


def test_streams_beyond_the_bound_are_refused() -> None:
    peer = a_peer(streams_max=2)
    assert peer.send(peer.headers(1), peer.headers(3)) == []
    refused = (http2.RST_STREAM, 0, 5, U32.pack(Code.REFUSED_STREAM))
    assert peer.send(peer.headers(5)) == [refused]
    peer.send(frame(http2.RST_STREAM, 0, 1, U32.pack(8)))
    assert peer.send(peer.headers(7)) == []


def test_a_message_beyond_the_bound_ends_its_call_alone() -> None:
    peer = a_peer()
    peer.send(peer.headers(1), peer.headers(3))
    head = b"\0" + U32.pack(http2.MESSAGE_MAX + 1)
    (last, nobody_reads) = peer.send(data(1, head))
    assert nobody_reads == reset(1, Code.NO_ERROR)
    assert last[:3] == (http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1)
    assert str(int(Status.RESOURCE_EXHAUSTED)).encode() in last[3]
    assert peer.echo.ends == ["reset"]
    assert list(peer.connection.streams) == [3]


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("gzip", gzip.compress(b"hello", mtime=0), None),
        ("deflate", zlib.compress(b"hello"), None),
        ("identity", b"hello", Status.INTERNAL),
        ("gzip", b"hello", Status.INTERNAL),
        ("gzip", gzip.compress(b"hello", mtime=0)[:-1], Status.INTERNAL),
        ("deflate", zlib.compress(b"hello") + b"x", Status.INTERNAL),
        ("br", b"hello", Status.UNIMPLEMENTED),
        ("gzip", gzip.compress(bytes(1001), mtime=0), Status.RESOURCE_EXHAUSTED),
    ],
)
def test_a_compressed_message_is_unpacked_within_the_bound_or_refused(
    encoding: str, content: bytes, status: Status | None
) -> None:
    peer = a_peer(message_max=1000)
    peer.send(peer.headers(1, more=(("grpc-encoding", encoding),)))
    back = peer.send(data(1, b"\1" + U32.pack(len(content)) + content))
    if status is None:
        assert back[-1][3] == message(b"hello")
    else:
        assert status_of(back) == status
        assert peer.echo.ends == ["reset"]


@pytest.mark.parametrize("seed", range(30))
def test_a_message_is_unpacked_in_steps(seed: int) -> None:
    rng = random.Random(seed)
    plain = rng.randbytes(rng.randrange(1, 1 << 17)) * rng.randrange(1, 60)
    encoding = rng.choice(("gzip", "deflate"))
    level = rng.randrange(10)
    pack = zlib.compress if encoding == "deflate" else gzip.compress
    content = pack(plain, level)
    cut = rng.choice((b"", content[: rng.randrange(len(content))], content + b"x"))
    bytes_max = len(plain) - rng.choice((0, 0, 1))
    count, unpacked = 0, None
    steps = unpacking(cut or content, encoding, bytes_max)
    try:
        while True:
            next(steps)
            count += 1
    except StopIteration as done:
        unpacked = done.value
    except ValueError:
        assert cut or bytes_max < len(plain)
    assert count <= len(plain) // STEP_BYTES
    if not cut and bytes_max == len(plain):
        assert (count, unpacked) == (len(plain) // STEP_BYTES, plain)


def test_messages_without_an_end_are_bounded_over_all_streams_of_a_connection() -> None:
    peer = a_peer()
    held = peer.connection.held
    held.bytes_max = 1000 + 4 * STREAM_BYTES
    half = b"\0" + U32.pack(600) + bytes(400)
    for number in (1, 3):
        peer.send(peer.headers(number))
        assert peer.send(data(number, half)) == []
    peer.send(data(1, bytes(200)))  # this one is whole now
    peer.send(peer.headers(5))
    assert peer.send(data(5, half)) == []
    peer.send(peer.headers(7))
    assert status_of(peer.send(data(7, half))) == Status.RESOURCE_EXHAUSTED
    assert list(peer.connection.streams) == [1, 3, 5]
    peer.send(
        frame(http2.RST_STREAM, 0, 3, U32.pack(8)), frame(http2.RST_STREAM, 0, 5, U32.pack(8))
    )
    assert held.bytes == STREAM_BYTES + peer.connection.waiting_bytes


def test_what_comes_for_an_answer_that_waits_for_room_is_not_kept() -> None:
    peer = a_peer(answers=False)
    peer.send(frame(http2.SETTINGS, 0, 0, struct.pack(">HI", 4, 0)), peer.headers(1))
    (stream,) = peer.connection.streams.values()
    peer.connection.send(stream, b"answer")
    peer.connection.finish(stream)
    for _ in range(50):
        peer.send(data(1, bytes(10_000)))
    assert not stream.inbox
    assert status_of(peer.send(frame(http2.WINDOW_UPDATE, 0, 1, U32.pack(100)))) == Status.OK


def test_a_held_stream_gets_no_more_room_until_its_messages_are_taken() -> None:
    peer = a_peer(answers=False)
    peer.send(peer.headers(1))
    (stream,) = peer.connection.streams.values()
    peer.connection.hold(stream, held=True)
    part = message(bytes(16_000 - 5))
    count = http2.STREAM_WINDOW // len(part)
    for _ in range(count):
        assert [one for one in peer.send(data(1, part)) if one[2] == 1] == []
    assert peer.send(data(1, part)) == [reset(1, Code.FLOW_CONTROL_ERROR)]
    peer = a_peer(answers=False)
    peer.send(peer.headers(1))
    (stream,) = peer.connection.streams.values()
    peer.connection.hold(stream, held=True)
    for _ in range(count):
        peer.send(data(1, part))
    peer.connection.hold(stream, held=False)
    (grant,) = peer.back()
    assert grant[:3] == (http2.WINDOW_UPDATE, 0, 1)
    assert U32.unpack(grant[3])[0] == count * len(part)


def test_metadata_over_the_bound_ends_its_call_and_not_the_connection() -> None:
    peer = a_peer(headers_max=1000)
    (refused, _) = peer.send(peer.headers(1, more=(("x", "y" * 900),)))
    assert refused[:3] == (http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1)
    assert b"metadata of over 1000 bytes" in refused[3]
    peer.send(peer.headers(3))
    (_, answer) = peer.send(data(3, message(b"hello")))
    assert answer[3] == message(b"hello")


def test_pings_that_come_too_soon_end_their_connection_as_grpcs_own_server_does() -> None:
    peer = a_peer(ping_every_s=10.0)
    ping = frame(http2.PING, 0, 0, bytes(8))
    for _ in range(5):
        peer.now_s += 10.0
        peer.send(ping)
    peer.send(peer.headers(1))
    for _ in range(9):  # with an answer between them, as of a client that measures
        peer.send(data(1, message(b"x")), ping)
    peer.send(ping, ping)
    with pytest.raises(ConnectionFault, match="too_many_pings"):
        peer.send(ping)


def test_pings_between_answers_cost_nothing_however_fast_the_answers_are() -> None:
    """grpc-go's client measures its path by them, unless its windows are fixed."""
    peer = a_peer(ping_every_s=10.0)
    peer.send(peer.headers(1))
    for _ in range(5 * http2.CONTROL_MAX):  # within one second
        *_, (kind, flags, _, _) = peer.send(
            data(1, message(b"x")), frame(http2.PING, 0, 0, bytes(8))
        )
        assert (kind, flags) == (http2.PING, http2.ACK)
        peer.send(frame(http2.WINDOW_UPDATE, 0, 0, U32.pack(100)))
        peer.send(frame(http2.WINDOW_UPDATE, 0, 1, U32.pack(100)))


def test_a_keepalive_ping_may_come_a_tenth_early() -> None:
    peer = a_peer(ping_every_s=10.0)
    for _ in range(20):
        peer.now_s += 9.0
        peer.send(frame(http2.PING, 0, 0, bytes(8)))


def test_after_go_away_new_streams_are_refused_and_old_ones_go_on() -> None:
    peer = a_peer()
    peer.send(peer.headers(1))
    peer.connection.go_away(last=False)
    away, ping = peer.back()
    assert away[0] == http2.GOAWAY
    assert ping == (http2.PING, 0, 0, http2.FAREWELL)
    assert peer.send(peer.headers(3)) == []
    peer.send(frame(http2.PING, http2.ACK, 0, bytes(8)))
    assert not peer.connection.acknowledged
    peer.send(frame(http2.PING, http2.ACK, 0, http2.FAREWELL))
    assert peer.connection.acknowledged
    peer.connection.go_away(last=True)
    (away,) = peer.back()
    assert away[3][:4] == U32.pack(3)
    ((kind, _, number, _),) = peer.send(peer.headers(5))
    assert (kind, number) == (http2.RST_STREAM, 5)
    assert len(peer.send(data(1, message(b"on")))) == 2
    peer.connection.go_away(last=False)  # as of a connection whose age ends in a drain
    assert list(peer.back()) == [], "the last stream's number may not rise"
    ((kind, _, number, _),) = peer.send(peer.headers(7))
    assert (kind, number) == (http2.RST_STREAM, 7)


SETTING = struct.Struct(">HI")


def _flood(kind: int, payload: bytes, number: int = 0) -> Callable[[Peer], list[bytes]]:
    return lambda peer: [peer.headers(1), *[frame(kind, 0, number, payload)] * 20_000]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (lambda peer: [data(0, b"x")], Code.PROTOCOL_ERROR),
        (lambda peer: [data(1, b"x")], Code.PROTOCOL_ERROR),
        (lambda peer: [peer.headers(2)], Code.PROTOCOL_ERROR),
        (lambda peer: [peer.headers(0)], Code.PROTOCOL_ERROR),
        (lambda peer: [frame(http2.CONTINUATION, 0, 1)], Code.PROTOCOL_ERROR),
        (
            lambda peer: [frame(http2.HEADERS, 0, 1, b""), frame(http2.PING, 0, 0, bytes(8))],
            Code.PROTOCOL_ERROR,
        ),
        (lambda peer: [frame(http2.PUSH_PROMISE, 0, 1)], Code.PROTOCOL_ERROR),
        (lambda peer: [frame(http2.HEADERS, 4, 1, b"\xff" * 20)], Code.COMPRESSION_ERROR),
        (lambda peer: [frame(http2.PING, 0, 0, b"x")], Code.FRAME_SIZE_ERROR),
        (lambda peer: [frame(http2.RST_STREAM, 0, 1, b"x")], Code.FRAME_SIZE_ERROR),
        (lambda peer: [frame(http2.RST_STREAM, 0, 1, bytes(4))], Code.PROTOCOL_ERROR),
        (lambda peer: [frame(http2.WINDOW_UPDATE, 0, 0, bytes(4))], Code.PROTOCOL_ERROR),
        (
            lambda peer: [frame(http2.WINDOW_UPDATE, 0, 0, U32.pack((1 << 31) - 1))],
            Code.FLOW_CONTROL_ERROR,
        ),
        (lambda peer: [frame(http2.SETTINGS, 0, 0, b"x")], Code.FRAME_SIZE_ERROR),
        (lambda peer: [frame(http2.SETTINGS, 0, 3)], Code.PROTOCOL_ERROR),
        (
            lambda peer: [frame(http2.SETTINGS, 0, 0, SETTING.pack(4, 1 << 31))],
            Code.FLOW_CONTROL_ERROR,
        ),
        (lambda peer: [frame(http2.SETTINGS, 0, 0, SETTING.pack(5, 1))], Code.PROTOCOL_ERROR),
        (lambda peer: [struct.pack(">IBI", 16_385 << 8, 0, 1)], Code.FRAME_SIZE_ERROR),
        (
            lambda peer: [peer.headers(1), frame(http2.DATA, http2.PADDED, 1, b"\5ab")],
            Code.PROTOCOL_ERROR,
        ),
        (lambda peer: [peer.headers(1), data(1, b"", http2.END_STREAM)] * 2, None),
        (_flood(http2.PING, bytes(8)), Code.ENHANCE_YOUR_CALM),
        (_flood(http2.SETTINGS, b""), Code.ENHANCE_YOUR_CALM),
        (_flood(http2.PRIORITY, bytes(5), 1), Code.ENHANCE_YOUR_CALM),
        (_flood(http2.DATA, b"", 1), Code.ENHANCE_YOUR_CALM),
        (_flood(http2.RST_STREAM, bytes(4), 1), Code.ENHANCE_YOUR_CALM),
        (
            lambda peer: [
                frame(http2.HEADERS, 0, 1, bytes(9)),
                *[frame(http2.CONTINUATION, 0, 1, bytes(16_000))] * 10,
            ],
            Code.ENHANCE_YOUR_CALM,
        ),
    ],
)
def test_a_broken_peer_gets_the_rfcs_error(
    frames: Callable[[Peer], list[bytes]], code: Code | None
) -> None:
    peer = a_peer()
    if code is None:
        peer.send(*frames(peer))
        return
    with pytest.raises(ConnectionFault) as raised:
        peer.send(*frames(peer))
    assert raised.value.code is code
    *_, (kind, _, number, payload) = peer.back()
    assert (kind, number) == (http2.GOAWAY, 0)
    assert U32.unpack_from(payload, 4)[0] == code


def test_the_fault_of_broken_headers_is_the_same_for_all_connections() -> None:
    """The HPACK library's own text for this block has an address of the process's memory."""
    block = b"\x00\x07:method\x04O" + b"\xff" * 12
    said = set()
    for _ in range(3):
        peer = a_peer()
        with pytest.raises(ConnectionFault) as raised:
            peer.send(frame(http2.HEADERS, http2.END_HEADERS, 1, block))
        said.add(str(raised.value))
    assert said == {"headers can't be decoded (HPACKDecodingError)"}


def test_what_is_no_http2_is_refused() -> None:
    connection = Connection(Echo(), clock=lambda: 0.0, streams_max=1)
    with pytest.raises(ConnectionFault):
        connection.receive(b"GET / HTTP/1.1\r\n", 0.0)


def test_a_calm_second_follows_a_busy_one() -> None:
    peer = a_peer()
    for second in range(3):
        peer.now_s = float(second)
        peer.send(*[frame(http2.PING, 0, 0, bytes(8))] * 900)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_raise_nothing_but_faults(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        peer = a_peer(streams_max=4)
        number = 1
        for _ in range(rng.randrange(1, 30)):
            choice = rng.random()
            if choice < 0.3:
                sent = peer.headers(number)
                number += 2 * rng.randrange(2)
            elif choice < 0.6:
                content = message(rng.randbytes(rng.randrange(40)))
                sent = data(rng.randrange(8), content, rng.randrange(16))
            elif choice < 0.9:
                payload = rng.randbytes(rng.choice((0, 4, 5, 6, 8, 30)))
                sent = frame(rng.randrange(12), rng.randrange(64), rng.randrange(8), payload)
            else:
                sent = rng.randbytes(rng.randrange(40))
            try:
                peer.send(sent)
            except ConnectionFault:
                peer.connection.lost()
                assert peer.connection.streams == {}
                break
        assert len(peer.connection.streams) <= 4
