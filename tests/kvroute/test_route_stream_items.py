"""What a stream carries, against a model that keeps every item's fate."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.client import ClientOverloaded
from kvroute.client.connections import route_stream_items as stream_items_module
from kvroute.client.connections.route_stream_items import (
    BATCH_BYTES_MAX,
    SENDINGS_MAX,
    Item,
    RouteStreamItems,
)
from kvroute.client.messages.options import RouteBytes
from kvroute.client.messages.wire import varint
from kvroute.v1 import RouteBatch, RouteRequest

NOBODY: Any = None
ITEMS_MAX = 12
BYTES_MAX = 3 * BATCH_BYTES_MAX


def add(
    items: RouteStreamItems, name: str = "r", size: int = 20, deadline_s: float = 100.0
) -> Item:
    """size: of the request, 20 or more."""
    about = RouteRequest(request_id=name).SerializeToString()
    length = size - len(about) - 7
    filling = b"\xfa\x7f" + bytes((length >> 7 * i) & 0x7F | 0x80 for i in range(4)) + b"\x00"
    request = RouteBytes(name, (about, filling, bytes(length)), size)
    return items.add(request, deadline_s, 0.0, NOBODY)


def write(items: RouteStreamItems, now_s: float) -> RouteBatch:
    """The next batch, whose indexes are told beside it."""
    content, indexes = items.batch(now_s)
    batch = RouteBatch.FromString(content)
    assert indexes == [item.index for item in batch.items]
    return batch


def names(batch: RouteBatch) -> list[str]:
    return [item.request.request_id or f"cancel {item.index}" for item in batch.items]


def test_a_batch_has_what_waits_in_order_with_the_time_left() -> None:
    items = RouteStreamItems(10, 1000)
    first = add(items, "a", deadline_s=5.0)
    add(items, "b", deadline_s=4.0001)
    add(items, "late", deadline_s=3.0)
    batch = write(items, 4.0)
    assert names(batch) == ["a", "b", "late"]
    assert [item.timeout_ms for item in batch.items] == [1000, 1, 1]
    assert batch.items[0].index == first.index
    assert not items.to_write
    assert names(write(items, 4.0)) == []


def test_a_batch_stays_within_its_bytes_but_for_one_item_alone() -> None:
    items = RouteStreamItems(10, 10 * BATCH_BYTES_MAX)
    half = BATCH_BYTES_MAX // 2
    for name, size in (("a", half), ("b", half), ("c", half), ("d", 2 * BATCH_BYTES_MAX)):
        add(items, name, size)
    assert items.full_batch
    assert [names(write(items, 0.0)) for _ in range(3)] == [["a", "b"], ["c"], ["d"]]


def test_a_batch_stays_within_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_items_module, "BATCH_ITEMS_MAX", 3)
    items = RouteStreamItems(10, 1000)
    for name in "abcd":
        add(items, name)
    assert items.full_batch
    assert [names(write(items, 0.0)) for _ in range(2)] == [["a", "b", "c"], ["d"]]
    assert not items.full_batch


def test_a_dropped_item_is_not_written_and_a_written_one_is_cancelled() -> None:
    items = RouteStreamItems(10, 1000)
    written = add(items, "a")
    write(items, 0.0)
    waiting = add(items, "b")
    add(items, "c")
    assert items.drop(waiting)
    assert items.drop(written)
    assert not items.drop(written)
    assert names(write(items, 0.0)) == [f"cancel {written.index}", "c"]
    assert items.sent(written.index) is None


def test_items_are_bounded_and_cancels_count() -> None:
    items = RouteStreamItems(2, 1000)
    first, _ = add(items, "a"), add(items, "b")
    with pytest.raises(ClientOverloaded, match="2 requests are unanswered") as caught:
        add(items, "c")
    assert caught.value.retry_after_s is None
    write(items, 0.0)
    items.drop(first)
    with pytest.raises(ClientOverloaded):
        add(items, "c")
    write(items, 0.0)
    add(items, "c")


def test_bytes_are_bounded_but_one_request_always_passes() -> None:
    items = RouteStreamItems(10, 100)
    huge = add(items, "a", size=500)
    with pytest.raises(ClientOverloaded, match="500 bytes"):
        add(items, "b")
    items.drop(huge)
    add(items, "b", size=100)


def test_what_a_stream_left_goes_first_on_the_next_and_not_for_ever() -> None:
    items = RouteStreamItems(10, 1000)
    add(items, "a")
    for _ in range(SENDINGS_MAX):
        assert names(write(items, 0.0)) == ["a"]
        add(items, "b")
        given_up = items.put_back()
        for item in list(items._waiting.values()):
            if item.request.request_id == "b":
                items.drop(item)
    assert [item.request.request_id for item in given_up] == ["a"]
    assert not len(items)


class RouteStream(RuleBasedStateMachine):
    """Random life: every item has one fate, and no bound is ever exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.items = RouteStreamItems(ITEMS_MAX, BYTES_MAX)
        self.here: dict[str, Item] = {}
        self.cancelled: set[int] = set()
        self.count = 0

    @rule(size=st.integers(20, BATCH_BYTES_MAX))
    def add(self, size: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        held = sum(item.request.size for item in self.here.values())
        full = len(self.here) + len(self.cancelled) >= ITEMS_MAX
        try:
            self.here[name] = add(self.items, name, size)
        except ClientOverloaded:
            assert full or held + size > BYTES_MAX
        else:
            assert not full
            assert held + size <= BYTES_MAX

    @rule()
    def write(self) -> None:
        batch = write(self.items, 0.0)
        requests = [item for item in batch.items if item.HasField("request")]
        assert (
            sum(self.here[item.request.request_id].request.size for item in requests)
            <= BATCH_BYTES_MAX
        )
        indexes = [item.index for item in requests]
        assert indexes == sorted(indexes)
        cancels = {item.index for item in batch.items if not item.HasField("request")}
        assert cancels == self.cancelled
        self.cancelled = set()

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        item = self.items.sent(self.here[name].index)
        if item is not None:
            self.items.answered(item)
            assert self.here.pop(name) is item

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        item = self.here.pop(data.draw(st.sampled_from(sorted(self.here))))
        if item.index in self.items._sent:
            self.cancelled.add(item.index)
        assert self.items.drop(item)
        assert not self.items.drop(item)

    @rule()
    def drop_all(self) -> None:
        self.cancelled |= self.items._sent.keys()
        dropped = self.items.drop_all()
        assert {id(one) for one in dropped} == {id(one) for one in self.here.values()}
        self.here = {}

    @rule()
    def undo(self) -> None:
        self.count += 1
        self.items.cancel(1_000_000 + self.count)
        self.cancelled.add(1_000_000 + self.count)

    @rule()
    def end_of_stream(self) -> None:
        for item in self.items.put_back():
            assert item.sendings == SENDINGS_MAX
            del self.here[item.request.request_id]
        self.cancelled = set()

    @rule()
    def clear(self) -> None:
        assert {id(one) for one in self.items.clear()} == {id(one) for one in self.here.values()}
        self.here, self.cancelled = {}, set()

    @invariant()
    def every_item_is_here_once(self) -> None:
        waiting, sent = self.items._waiting, self.items._sent
        assert not waiting.keys() & sent.keys()
        assert {*waiting, *sent} == {item.index for item in self.here.values()}
        assert len(self.items) == len(self.here)
        assert self.items._bytes == sum(item.request.size for item in self.here.values())
        assert self.items._waiting_bytes == sum(item.request.size for item in waiting.values())
        assert self.items.to_write == bool(waiting or self.cancelled)


RouteStream.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRouteStream = RouteStream.TestCase


def test_what_is_over_is_told_and_when_the_next_one_is() -> None:
    items = RouteStreamItems(10, 1000)
    assert items.expired(0.0) == ([], math.inf)
    sent, later = add(items, "a", deadline_s=5.0), add(items, "b", deadline_s=7.0)
    write(items, 0.0)
    waiting = add(items, "c", deadline_s=6.0)
    assert items.expired(4.9) == ([], 5.0)
    assert items.expired(6.0) == ([sent, waiting], 7.0)
    assert items.expired(8.0) == ([sent, later, waiting], math.inf)


@given(st.integers(0, 1 << 64))
def test_a_varint_is_protobuf_s(number: int) -> None:
    written = varint(number)
    read = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(written))
    assert read == number
    assert [byte >> 7 for byte in written] == [1] * (len(written) - 1) + [0]


def test_items_need_no_event_loop() -> None:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert repr(RouteStreamItems(1, 1)) == "<RouteStreamItems 0 waiting, 0 sent>"
