"""What a peer may cost: frames in any order against laws that hold after each of them."""

import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.net.http2 import frames as http2
from router.net.http2.frames import Code, ConnectionFault, Status, frame
from router.net.http2.sending import Sending
from router.net.listener.held import MESSAGE_BYTES, STREAM_BYTES, Held, PortHeld
from tests.router.net.http2.peer import Peer, a_peer, data, message, reset, status_of

U32, SETTING = struct.Struct(">I"), struct.Struct(">HI")
NUMBERS = (0, 1, 1, 3, 3, 5, 7, 9, 2, 99)


def window(number: int, room: int) -> bytes:
    return frame(http2.WINDOW_UPDATE, 0, number, U32.pack(room))


def windows(*sizes: int) -> bytes:
    return frame(http2.SETTINGS, 0, 0, b"".join(SETTING.pack(4, size) for size in sizes))


def held_by(peer: Peer) -> int:
    """What the account must have, counted anew from the streams."""
    streams = peer.connection.streams.values()
    return sum(STREAM_BYTES + len(one.inbox) + len(one.waiting) for one in streams)


def any_frame(draw: Callable[[Any], Any], peer: Peer) -> bytes:
    number = draw(st.sampled_from(NUMBERS))
    kind = draw(st.sampled_from("hhhdddddwwsrpgu"))
    if kind == "h":
        return peer.headers(number, draw(st.sampled_from((4, 4, 4, 5))))
    if kind == "d":
        content = message(bytes(draw(st.sampled_from((0, 1, 5, 300, 9000)))))
        cut = draw(st.integers(0, len(content)))
        flags = draw(st.sampled_from((0, 0, 0, 1)))
        return data(number, content[:cut]) + data(number, content[cut:], flags)
    if kind == "w":
        return window(number, draw(st.sampled_from((1, 7, 1000, 70_000, (1 << 31) - 1))))
    if kind == "s":
        sizes = draw(st.lists(st.sampled_from((0, 1, 65_535, 1 << 20)), max_size=5))
        return windows(*sizes)
    if kind == "r":
        return frame(http2.RST_STREAM, 0, number, U32.pack(8))
    if kind == "p":
        return frame(http2.PING, draw(st.integers(0, 1)), 0, bytes(8))
    if kind == "g":
        return frame(http2.GOAWAY, 0, 0, bytes(8))
    return frame(draw(st.integers(0, 255)), draw(st.integers(0, 255)), number, bytes(4))


@settings(max_examples=300)
@given(st.data())
def test_any_frames_leave_the_account_as_the_streams_have_it(drawn: st.DataObject) -> None:
    """300 sequences of up to 60 frames."""
    peer = a_peer(streams_max=4, answers=drawn.draw(st.booleans()))
    peer.connection.held.bytes_max = most = drawn.draw(st.sampled_from((9000, 20_000, 1 << 20)))
    for _ in range(drawn.draw(st.integers(1, 60))):
        peer.now_s += drawn.draw(st.sampled_from((0.0, 0.001, 1.0, 30.0)))
        try:
            peer.send(any_frame(drawn.draw, peer))
        except ConnectionFault:
            break
        connection = peer.connection
        assert connection.held.bytes == held_by(peer) <= most
        assert connection.waiting_bytes == sum(map(len, waiting(peer)))
        if drawn.draw(st.booleans()):
            connection.end_unread(peer.now_s, 20.0)
            assert all(
                peer.now_s - 20 < one.since_s for one in connection.streams.values() if one.waiting
            )
    while peer.connection.lost():
        pass
    assert peer.connection.streams == {}
    assert peer.connection.held.bytes == 0


def waiting(peer: Peer) -> list[bytearray]:
    return [stream.waiting for stream in peer.connection.streams.values()]


IDLE = {
    "PING": frame(http2.PING, 0, 0, bytes(8)),
    "PING acknowledged": frame(http2.PING, 1, 0, bytes(8)),
    "SETTINGS": frame(http2.SETTINGS, 0, 0),
    "SETTINGS acknowledged": frame(http2.SETTINGS, 1, 0),
    "WINDOW_UPDATE": window(0, 1),
    "WINDOW_UPDATE of a stream": window(1, 1),
    "WINDOW_UPDATE of a stream that is over": window(3, 1),
    "WINDOW_UPDATE that lets an answer trickle": window(7, 1),
    "PRIORITY": frame(http2.PRIORITY, 0, 1, bytes(5)),
    "PRIORITY of an idle stream": frame(http2.PRIORITY, 0, 99, bytes(5)),
    "GOAWAY": frame(http2.GOAWAY, 0, 0, bytes(8)),
    "an unknown kind": frame(0xFA, 0, 0),
    "an unknown kind of a stream": frame(0xFB, 7, 1, bytes(100)),
    "empty DATA": data(1, b""),
    "padded empty DATA": frame(http2.DATA, http2.PADDED, 1, b"\x03" + bytes(3)),
    "DATA of a stream that is over": data(3, b"x"),
    "DATA of a stream that was refused": data(5, b"x"),
    "RST_STREAM of a stream that is over": frame(http2.RST_STREAM, 0, 3, U32.pack(8)),
    "headers of a stream that is over": frame(http2.HEADERS, 4, 3, b"\x88"),
    "headers of a stream that was refused": frame(http2.HEADERS, 4, 5, b"\x88"),
}


def with_streams() -> Peer:
    """Stream 1 is open, 3 is over, 5 was refused, and of 7 an answer waits."""
    peer = a_peer(answers=False)
    peer.send(peer.headers(1), peer.headers(3, 5))
    peer.send(frame(http2.HEADERS, 4, 5, b"\x83"), peer.headers(7), windows(0))
    peer.connection.send(peer.connection.streams[7], bytes(100_000))
    list(peer.back())
    return peer


def ends_calmly(peer: Peer, sent: list[bytes]) -> None:
    """The frames, each by itself, end the connection."""

    def send() -> None:
        for one in sent:
            peer.send(one)

    with pytest.raises(ConnectionFault, match="carry nothing") as raised:
        send()
    assert raised.value.code is Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("kind", IDLE)
def test_every_frame_that_carries_nothing_counts(kind: str) -> None:
    ends_calmly(with_streams(), [IDLE[kind]] * 3 * http2.CONTROL_MAX)


@pytest.mark.parametrize("seed", range(20))
def test_they_count_together(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.sample(sorted(IDLE), rng.randint(2, len(IDLE)))
    ends_calmly(with_streams(), [IDLE[rng.choice(kinds)] for _ in range(3 * http2.CONTROL_MAX)])


@pytest.mark.parametrize("kind", IDLE)
def test_a_thousand_a_second_may_come(kind: str) -> None:
    peer = with_streams()
    for _ in range(5):
        peer.now_s += 1.0
        peer.send(*[IDLE[kind]] * 900)


def test_small_parts_of_a_header_block_count() -> None:
    peer = a_peer()
    with pytest.raises(ConnectionFault) as raised:
        peer.send(frame(http2.HEADERS, 0, 1), frame(http2.CONTINUATION, 0, 1, b"a") * 3000)
    assert raised.value.code is Code.ENHANCE_YOUR_CALM


def test_streams_past_the_bound_count() -> None:
    peer = a_peer(streams_max=1)
    ends_calmly(peer, [peer.headers(number) for number in range(1, 6 * http2.CONTROL_MAX, 2)])


def test_answers_allow_what_clients_send_for_them() -> None:
    """Two updates of windows, a ping and an RST_STREAM for each, at any rate."""
    peer = a_peer(ping_every_s=10.0)
    for number in range(1, 8 * http2.CONTROL_MAX, 2):
        peer.send(peer.headers(number), data(number, message(b"x"), 1))
        peer.send(window(0, 8), window(number, 8), frame(http2.PING, 0, 0, bytes(8)))
        peer.send(frame(http2.RST_STREAM, 0, number, U32.pack(8)) if number % 4 == 1 else b"")
        peer.now_s += 0.001


class Touched:
    """How often streams are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        flush = Sending._flush

        def counted(sending: Sending, *about: Any) -> int:
            self.count += 1
            return flush(sending, *about)

        monkeypatch.setattr(Sending, "_flush", counted)


def peer_whose_answers_wait(count: int) -> Peer:
    peer = a_peer(streams_max=2 * count)
    peer.send(windows(0))
    for number in range(1, 2 * count, 2):
        peer.send(peer.headers(number), data(number, message(b"hello"), 1))
    assert peer.connection._sending.waiting == count
    return peer


def test_credit_of_the_connection_looks_at_no_stream_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = peer_whose_answers_wait(2000)
    touched = Touched(monkeypatch)
    peer.send(*[window(0, 1)] * 5000)
    assert touched.count == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_turn_looks_at_so_many_streams_whatever_comes(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    peer = peer_whose_answers_wait(1000)
    touched = Touched(monkeypatch)
    connection = peer.connection
    for second in range(100):
        sent = b"".join(
            rng.choice(
                (window(0, 1), window(rng.randrange(1, 2000, 2), 1), windows(rng.randrange(9)))
            )
            for _ in range(rng.randrange(1, 30))
        )
        touched.count = 0
        connection.receive(sent, float(second))
        assert touched.count == 0
        connection.pump()
        assert touched.count <= http2.PUMP_STREAMS
        connection.out.clear()


@pytest.mark.interpreted
def test_the_last_value_of_a_setting_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peer_whose_answers_wait(500)
    touched = Touched(monkeypatch)
    resized = Counter[int]()
    resize = Sending.resize
    monkeypatch.setattr(
        Sending,
        "resize",
        lambda self, size, streams: (resized.update([size]), resize(self, size, streams)),
    )
    peer.send(windows(*([1000, 7] * 1364), 10))
    assert resized == {10: 1}
    assert touched.count <= 2 * 500
    assert peer.connection._sending.waiting == 0


def test_settings_of_another_window_cost_what_their_streams_cost() -> None:
    peer = a_peer(streams_max=8192, answers=False)
    for number in range(1, 2 * 8192, 2):
        peer.send(peer.headers(number))
    ends_calmly(peer, [windows(size) for size in range(http2.CONTROL_MAX // 16)])


@pytest.mark.parametrize("seed", range(5))
def test_a_turn_takes_so_many_frames_whatever_they_are(seed: int) -> None:
    rng = random.Random(seed)
    peer = a_peer(streams_max=5000, answers=False)
    peer.send(peer.headers(1))
    number = 3
    parts = []
    for _ in range(4000):
        one = rng.choice((data(1, message(b"x")), window(0, 1), window(1, 1), peer.headers(number)))
        number += 2 if one[3] == http2.HEADERS else 0
        parts.append(one)
    opened, messages = len(peer.echo.opens), len(peer.echo.messages)
    sent, turns = b"".join(parts), 0
    while peer.connection.receive(sent, float(turns)):
        sent, turns = b"", turns + 1
        new = len(peer.echo.opens) - opened, len(peer.echo.messages) - messages
        assert new[0] * http2.OPEN_WORK + new[1] * http2.MESSAGE_WORK <= (
            http2.TURN_WORK + http2.OPEN_WORK
        )
        opened, messages = len(peer.echo.opens), len(peer.echo.messages)
    assert turns >= 4000 / http2.TURN_WORK


def test_a_turn_takes_so_many_messages_whatever_frames_they_come_in() -> None:
    peer = a_peer(answers=False, finishes=False)
    peer.send(peer.headers(1))
    in_frame = 3000
    frames = data(1, message(b"") * in_frame) * 3
    for count in (1, 2):
        assert peer.connection.receive(frames, 0.0)
        assert len(peer.echo.messages) == count * in_frame
        frames = b""
    assert peer.connection.receive(b"", 0.0) is False
    assert len(peer.echo.messages) == 3 * in_frame


def test_a_peer_that_asks_on_without_reading_gets_one_call_in_a_turn() -> None:
    unread = http2.TURN_WORK // http2.UNREAD_WORK
    peer = peer_whose_answers_wait(unread)
    further = range(2 * unread + 1, 2 * unread + 100, 2)
    opened = len(peer.echo.opens)
    assert peer.connection.receive(b"".join(map(peer.headers, further[:3])), 0.0)
    assert len(peer.echo.opens) == opened + 1
    peer.send(b"", windows(1 << 20))
    assert len(peer.echo.opens) == opened + 3
    assert peer.connection._sending.waiting == 0
    assert peer.connection.receive(b"".join(map(peer.headers, further[3:])), 0.0)
    assert len(peer.echo.opens) == opened + 3 + http2.TURN_STREAMS, "they are read"


def test_answers_share_the_connections_room() -> None:
    """A frame of each that has room, in turn, whoever came first."""
    peer = a_peer(streams_max=9, answers=False, finishes=False)
    for number in (1, 3, 5):
        peer.send(peer.headers(number))
        peer.send(window(number, 1 << 20))
    streams = peer.connection.streams
    for number in (1, 3, 5):
        peer.connection.send(streams[number], bytes(100_000))
    list(peer.back())
    back = peer.send(window(0, 6 * (1 << 14)))
    sizes = Counter[int]()
    for kind, _, number, payload in back:
        if kind == http2.DATA:
            sizes[number] += len(payload)
    assert set(sizes.values()) == {2 << 14}


def test_answers_past_the_bound_end_their_calls() -> None:
    """Of a peer that opens no window."""
    peer = a_peer(streams_max=1000)
    peer.connection.held.bytes_max = most = 1 << 20
    peer.send(windows(0))
    numbers = range(1, 400, 2)
    peer.send(*map(peer.headers, numbers))
    refused = 0
    for number in numbers:
        back = peer.send(data(number, message(bytes(16_000)), 1))
        refused += status_of(back) == Status.RESOURCE_EXHAUSTED
        assert peer.connection.held.bytes == held_by(peer) <= most
    assert refused > 100
    while held_by(peer) + STREAM_BYTES <= most:
        peer.send(peer.headers(number := number + 2))
    assert peer.send(peer.headers(number + 2)) == [reset(number + 2, Code.REFUSED_STREAM)]


def test_long_headers_of_open_calls_count_as_held() -> None:
    peer = a_peer()
    more = [("x-bin", "," * 100)]
    peer.send(peer.headers(1, more=more))
    (head,) = (head for _, head in peer.echo.opens)
    assert peer.connection.held.bytes == head.size > STREAM_BYTES
    peer.send(frame(http2.RST_STREAM, 0, 1, U32.pack(8)))
    assert peer.connection.held.bytes == 0


def test_a_call_with_more_metadata_than_its_bytes_show_is_refused() -> None:
    peer = a_peer(headers_max=16 << 10)
    more = [("x-bin", "," * 4000)]
    for number in (1, 3):
        assert status_of(peer.send(peer.headers(number, more=more * 4))) == (
            Status.RESOURCE_EXHAUSTED
        )
    assert peer.echo.opens == []
    assert peer.connection.held.bytes == 0


def test_an_answer_that_is_not_read_ends() -> None:
    peer = a_peer()
    ends: list[str] = []
    peer.send(windows(0), peer.headers(1), peer.headers(3))
    for number, stream in list(peer.connection.streams.items()):
        stream.unsent = lambda number=number: ends.append(f"unsent {number}")
    peer.send(data(1, message(bytes(100)), 1), data(3, message(bytes(100)), 1))
    peer.now_s = 15.0
    peer.send(window(3, 1))  # of this one a byte is read
    assert peer.connection.end_unread(19.9, 20.0) == 0
    assert peer.connection.end_unread(20.0, 20.0) == 1
    assert status_of(list(peer.back())) == Status.DEADLINE_EXCEEDED
    assert ends == ["unsent 1"]
    assert list(peer.connection.streams) == [3]
    assert peer.connection.end_unread(35.0, 20.0) == 1
    assert peer.connection.held.bytes == peer.connection.waiting_bytes == 0


def test_an_answer_has_its_time_from_when_it_waits_however_long_its_peer_was_silent() -> None:
    peer = a_peer(answers=False, finishes=False)
    peer.send(peer.headers(1, 5))
    peer.now_s = 25.0
    peer.connection.send(peer.connection.streams[1], bytes(100_000))
    assert peer.connection.end_unread(26.0, 20.0) == 0
    assert peer.connection.end_unread(44.9, 20.0) == 0
    assert peer.connection.end_unread(45.0, 20.0) == 1


@pytest.mark.parametrize("code", list(Code))
def test_an_answer_that_is_given_up_soon_after_it_was_sent_is_unsent(code: Code) -> None:
    peer = a_peer(answers=False, finishes=False)
    ends: list[int] = []
    for number in range(1, 2 * http2.REMEMBERED_MAX + 11, 2):
        peer.send(peer.headers(number, 5))
        stream = peer.connection.streams[number]
        stream.unsent = lambda number=number: ends.append(number)
        peer.connection.reply(stream, b"")
    give_up = [frame(http2.RST_STREAM, 0, number, U32.pack(code)) for number in (9, 11, 13, 11)]
    assert reset(9, code) not in peer.send(*give_up)
    # The last ones are known; NO_ERROR gives nothing up.
    assert ends == ([] if code is Code.NO_ERROR else [11, 13])


def test_a_lost_connection_has_its_answers_that_wait_unsent() -> None:
    peer = a_peer()
    ends: list[int] = []
    peer.send(windows(0), peer.headers(1))
    peer.connection.streams[1].unsent = lambda: ends.append(1)
    peer.send(data(1, message(bytes(100)), 1))
    assert ends == []
    peer.connection.lost()
    assert ends == [1]


@settings(max_examples=200)
@given(st.data())
def test_a_port_ends_the_connections_that_hold_most(drawn: st.DataObject) -> None:
    """200 sequences of up to 60 changes by 5 connections."""
    port, ended = PortHeld(1000), []
    accounts = []
    for i in range(5):
        held = Held(port, lambda i=i: ended.append(i), bytes_max=700)
        held.open()
        accounts.append(held)
    mine = [0] * 5
    for _ in range(drawn.draw(st.integers(1, 60))):
        i, size = drawn.draw(st.integers(0, 4)), drawn.draw(st.integers(0, 300))
        if drawn.draw(st.booleans()):
            before = list(ended)
            sizes = [size * (j == i) + have for j, have in enumerate(mine)]
            if accounts[i].take(size) and i not in before:
                mine[i] += size
            for j in ended[len(before) :]:
                assert sizes[j] == max(sizes)
                mine[j] = sizes[j] = 0
        else:
            size = min(size, mine[i])
            accounts[i].free(size)
            mine[i] -= size
        assert [one.bytes for one in accounts] == mine
        assert port.bytes == sum(mine) <= 1000
        assert all(mine[j] == 0 for j in ended)
    for one in accounts:
        one.close()
    assert port.bytes == 0
    assert port.connections == set()
    assert MESSAGE_BYTES < STREAM_BYTES
