"""What a NATS server sends, read whole and byte by byte, with whatever publishers put into it."""

import random

import pytest

from events.plane.nats_wire import LINE_BYTES_MAX, PAYLOAD_BYTES_MAX, Frames, Message, WireError

PLAIN: Message = (1, b"a.b", b"", b"", b"hello")
FRAMES: list[tuple[bytes, Message | bytes]] = [
    (b"MSG a.b 1 5\r\nhello\r\n", PLAIN),
    (b"MSG a.b 12 _INBOX.x.y 5\r\nhello\r\n", (12, b"a.b", b"_INBOX.x.y", b"", b"hello")),
    (b"MSG a.b 1 0\r\n\r\n", (1, b"a.b", b"", b"", b"")),
    (b"MSG a.b 1 11\r\nPING\r\nMSG\r\n\r\n", (1, b"a.b", b"", b"", b"PING\r\nMSG\r\n")),
    (
        b"HMSG a.b 1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n",
        (1, b"a.b", b"", b"NATS/1.0\r\n\r\n", b"hello"),
    ),
    (
        b"HMSG a.b 1 r 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
        (1, b"a.b", b"r", b"NATS/1.0 503\r\n\r\n", b""),
    ),
    (b"PING\r\n", b"PING"),
    (b"PONG\r\n", b"PONG"),
    (b"+OK\r\n", b"+OK"),
    (b"-ERR 'Permissions Violation'\r\n", b"-ERR 'Permissions Violation'"),
    (b'INFO {"max_payload":1048576}\r\n', b'INFO {"max_payload":1048576}'),
    # What publishers may choose: any byte but spaces, tabs and line ends in a subject; headers that
    # are none.
    (b"MSG a.\xff 1 1\r\nx\r\n", (1, b"a.\xff", b"", b"", b"x")),
    (b"MSG a.\x0b7 1 1\r\nx\r\n", (1, b"a.\x0b7", b"", b"", b"x")),
    (b"MSG a.\x0c9 1 1\r\nx\r\n", (1, b"a.\x0c9", b"", b"", b"x")),
    (b"MSG \x00 1 \xfe\xff 1\r\nx\r\n", (1, b"\x00", b"\xfe\xff", b"", b"x")),
    (b"HMSG a 1 2 3\r\n\xff\xfex\r\n", (1, b"a", b"", b"\xff\xfe", b"x")),
    (b"HMSG a 1 0 1\r\nx\r\n", (1, b"a", b"", b"", b"x")),
]


def fed(pieces: list[bytes]) -> list[Message | bytes]:
    frames = Frames()
    return [frame for piece in pieces for frame in frames.feed(piece)]


def test_frames_are_read_whole_byte_by_byte_and_in_any_pieces() -> None:
    data = b"".join(one for one, _ in FRAMES)
    expected = [frame for _, frame in FRAMES]
    assert fed([data]) == expected
    assert fed([bytes([one]) for one in data]) == expected
    rng = random.Random(1)
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(9)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert fed(pieces) == expected


def test_a_frame_that_is_not_whole_is_waited_for() -> None:
    for data, _ in FRAMES:
        for end in range(len(data)):
            assert fed([data[:end]]) == []


@pytest.mark.parametrize(
    "data",
    [
        b"MSG a\r\n",
        b"MSG a 1\r\n",
        b"MSG a 1 2 3 4\r\n",
        b"MSG a x 1\r\nx\r\n",
        b"MSG a 1 -1\r\n",
        b"MSG a 1 1\r\nxy\r\n",
        b"MSG a 1 %d\r\n" % (PAYLOAD_BYTES_MAX + 1),
        b"HMSG a 1 1\r\nx\r\n",
        b"HMSG a 1 5 1\r\nx\r\n",
        b"HMSG a 1 -5 1\r\nx\r\n",
        b"x" * (LINE_BYTES_MAX + 1),
    ],
)
def test_what_no_server_sends_is_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        fed([data])


def test_no_bytes_raise_anything_else() -> None:
    rng = random.Random(2)
    words = [b"MSG", b"HMSG", b" ", b"\r\n", b"1", b"a.b", b"\xff", b"PING", b"12", b"\x00", b"-"]
    for _ in range(5000):
        data = b"".join(rng.choices(words, k=rng.randrange(1, 30)))
        try:
            fed([data[:5], data[5:]])
        except WireError:
            continue
