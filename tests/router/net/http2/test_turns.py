"""Turns: a connection that opens or loses many streams at once lets others have theirs."""

import asyncio
from typing import Any

import pytest

from router.net.http2.frames import PREFACE, SETTINGS, TURN_STREAMS, frame
from router.net.http2.machine import Connection
from router.net.http2.requests import Head
from router.net.http2.sending import Stream
from router.net.http2.sockets import Bounds, Http2Protocol
from router.net.listener.held import PortHeld
from tests.stage.http2_frames import END_HEADERS, HEAD, HEADERS

MANY = 3 * TURN_STREAMS + 1
BOUNDS = Bounds(streams_max=1000)


def opening(count: int) -> bytes:
    numbers = range(1, 2 * count, 2)
    return b"".join(frame(HEADERS, END_HEADERS, number, HEAD) for number in numbers)


class Noted:
    """A service that notes which streams of which connection were opened and ended."""

    def __init__(self, name: str, events: list[tuple[str, str, int]]) -> None:
        self._name = name
        self._events = events

    def opened(self, stream: Stream, head: Head) -> None:
        self._events.append((self._name, "opened", stream.number))

    def too_large(self, stream: Stream, size: int) -> None:
        raise AssertionError("no message was sent")

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        raise AssertionError("no message was sent")

    def half_closed(self, stream: Stream) -> None:
        raise AssertionError("no stream was closed")

    def reset(self, stream: Stream) -> None:
        self._events.append((self._name, "reset", stream.number))


class Transport:
    """What a protocol uses of asyncio's transport."""

    def __init__(self) -> None:
        self.reads = True
        self.closes = False

    def write(self, _data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closes

    def pause_reading(self) -> None:
        if not self.reads:
            raise AssertionError("reading was paused twice")
        self.reads = False

    def resume_reading(self) -> None:
        if self.reads:
            raise AssertionError("reading was resumed twice")
        self.reads = True

    def close(self) -> None:
        self.closes = True

    def get_extra_info(self, _name: str) -> Any:
        return None


class Side:
    """A connection of a peer."""

    def __init__(self, name: str, events: list[tuple[str, str, int]]) -> None:
        self.left: list[Http2Protocol] = []
        self.transport = Transport()
        self.protocol = Http2Protocol(
            lambda _: Noted(name, events),
            bounds=BOUNDS,
            left=self.left.append,
            held=PortHeld(),
            unpacking=asyncio.Lock(),
        )
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]
        self.protocol.data_received(PREFACE + frame(SETTINGS, 0, 0))

    def lose(self) -> None:
        self.transport.closes = True
        self.protocol.connection_lost(None)


async def turns(count: int) -> None:
    """Lets the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_call_opens_a_turn_of_streams_and_the_next_ones_the_rest_in_order() -> None:
    events: list[tuple[str, str, int]] = []
    connection = Connection(Noted("a", events), clock=lambda: 0.0, streams_max=1000)
    assert not connection.receive(PREFACE + frame(SETTINGS, 0, 0), 0.0)
    assert connection.receive(opening(MANY), 0.0)
    assert len(events) == TURN_STREAMS
    assert connection.receive(b"", 0.0)
    assert connection.receive(b"", 0.0)
    assert not connection.receive(b"", 0.0)
    assert events == [("a", "opened", number) for number in range(1, 2 * MANY, 2)]


def test_a_turn_that_opens_as_many_streams_as_there_are_is_the_last() -> None:
    connection = Connection(Noted("a", []), clock=lambda: 0.0, streams_max=1000)
    connection.receive(PREFACE + frame(SETTINGS, 0, 0), 0.0)
    assert not connection.receive(opening(TURN_STREAMS), 0.0)
    assert len(connection.streams) == TURN_STREAMS


def test_refused_streams_count_as_well() -> None:
    connection = Connection(Noted("a", []), clock=lambda: 0.0, streams_max=1)
    connection.receive(PREFACE + frame(SETTINGS, 0, 0), 0.0)
    assert connection.receive(opening(2 * TURN_STREAMS), 0.0)
    refused = connection.out[2:]  # behind our settings, and the acknowledgement of theirs
    assert len(refused) == TURN_STREAMS - 1


async def test_another_connection_is_served_between_the_turns() -> None:
    events: list[tuple[str, str, int]] = []
    many, other = Side("many", events), Side("other", events)
    many.protocol.data_received(opening(MANY))
    other.protocol.data_received(opening(1))
    assert len(events) == TURN_STREAMS + 1
    assert events[-1] == ("other", "opened", 1)
    assert not many.transport.reads, "what is unread stays bounded"
    assert other.transport.reads
    await turns(MANY // TURN_STREAMS)
    assert [number for name, _, number in events if name == "many"] == [*range(1, 2 * MANY, 2)]
    assert many.transport.reads


async def test_bytes_that_come_between_the_turns_keep_their_order() -> None:
    events: list[tuple[str, str, int]] = []
    side = Side("a", events)
    whole = opening(MANY)
    half = len(whole) // 2 + 3  # within a frame
    side.protocol.data_received(whole[:half])
    side.protocol.data_received(whole[half:])  # as TLS may still have some when reading stops
    await turns(MANY // TURN_STREAMS + 1)
    assert events == [("a", "opened", number) for number in range(1, 2 * MANY, 2)]
    assert side.transport.reads


async def test_reading_waits_for_the_socket_as_well() -> None:
    side = Side("a", [])
    side.protocol.data_received(opening(MANY))
    side.protocol.pause_writing()
    await turns(MANY // TURN_STREAMS + 1)
    assert not side.transport.reads
    side.protocol.resume_writing()
    assert side.transport.reads


@pytest.mark.parametrize("opened_turns", [0, 1, 5])
async def test_a_connection_that_is_lost_ends_all_its_calls_turn_by_turn(opened_turns: int) -> None:
    events: list[tuple[str, str, int]] = []
    side, other = Side("a", events), Side("other", events)
    side.protocol.data_received(opening(MANY))
    await turns(opened_turns)
    opened = [number for _, _, number in events]
    side.lose()
    other.protocol.data_received(opening(1))
    reset_at_once = [event for event in events if event[1] == "reset"]
    assert len(reset_at_once) <= TURN_STREAMS
    await turns(MANY // TURN_STREAMS + 2)
    resets = [number for name, what, number in events if (name, what) == ("a", "reset")]
    assert resets == opened, "what had not had its turn was never opened"
    assert side.left == [side.protocol]
    assert side.protocol.http2.streams == {}
    assert other.left == []


async def test_a_fault_in_a_later_turn_closes_the_connection() -> None:
    events: list[tuple[str, str, int]] = []
    side = Side("a", events)
    side.protocol.data_received(opening(MANY) + frame(HEADERS, END_HEADERS, 2, HEAD))
    await turns(MANY // TURN_STREAMS + 1)
    assert side.transport.closes
    assert side.protocol.fault == "malformed"
    assert len(events) == MANY
