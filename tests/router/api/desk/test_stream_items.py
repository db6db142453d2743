"""What a stream's items come to, with a clock that the deciding itself turns."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvroute.v1 import (
    QueueProgress,
    RouteBatch,
    RouteItem,
    RouteRequest,
    RouteResult,
    RouteResults,
    router_pb2,
)
from router.api.desk import request_codec
from router.api.desk import stream_items as route_stream
from router.api.desk.answers import Later, Steps, Waiting
from router.api.desk.stream_items import SLICE_S, TOLD_MAX, RouteItems, read_batch
from router.decide.core.progress import Repeated
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Reason, Refusal
from router.request.wire.batches import Batch
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import taken_apart


def batch_of(*items: router_pb2.RouteItem) -> Batch:
    return read_batch(router_pb2.RouteBatch(items=items).SerializeToString())


@dataclass
class Desk:
    """Decides with a real core, at a price in seconds for each request."""

    cost_s: float = 0.0
    now_s: float = 100.0
    fleet: Fleet = field(default_factory=lambda: Fleet("w0"))
    cancelled: list[str] = field(default_factory=list)
    unsent: list[str] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        self.items = RouteItems(
            self.route,
            self.cancel,
            unsent=lambda one: self.unsent.append(one.request_id),
            clock=lambda: self.now_s,
            cpu_clock=lambda: self.now_s,
        )

    def route(self, content: bytes | None, left_s: float) -> Steps:
        yield from ()
        if content is None:
            raise Refusal(Reason.INVALID_FIELD, "no request")
        if left_s <= 0:
            raise Refusal(Reason.DEADLINE_EXCEEDED, "too late")
        request = request_codec.receive(content, 1 << 20)
        self.now_s += self.cost_s
        if request.model == "none":
            raise Refusal(Reason.UNKNOWN_MODEL, "as asked")
        request_ = self.fleet.request(prompt(32), request_id=request.request_id)
        outcome = self.fleet.core.route(request_, self.fleet.now_s)
        reservation = outcome.reservation
        answer = router_pb2.RouteResponse(reservation_id=reservation.id).SerializeToString()
        return answer, reservation, isinstance(outcome, Repeated)

    def cancel(self, reservation: Reservation) -> None:
        self.cancelled.append(reservation.request_id)
        self.fleet.core.withdraw(reservation, self.fleet.now_s)

    def messages(self, *items: router_pb2.RouteItem) -> Iterator[router_pb2.RouteResults]:
        for message in self.items.decide(batch_of(*items)):
            if message is None:
                self.turns += 1
                continue
            yield router_pb2.RouteResults.FromString(message)

    def decide(self, *items: router_pb2.RouteItem) -> list[router_pb2.RouteResults]:
        return list(self.messages(*items))


def item(index: int, name: str | None = None, **about: Any) -> router_pb2.RouteItem:
    request = router_pb2.RouteRequest(request_id=name or f"r{index}")
    return router_pb2.RouteItem(index=index, request=request, **about)


def cancel(index: int) -> router_pb2.RouteItem:
    return router_pb2.RouteItem(index=index, cancel=True)


def indexes(messages: list[router_pb2.RouteResults]) -> list[list[int]]:
    return [[result.index for result in message.results] for message in messages]


def test_a_quick_batch_is_answered_by_one_message() -> None:
    assert indexes(Desk().decide(*map(item, range(100)))) == [list(range(100))]


def test_a_slow_batch_is_answered_in_slices() -> None:
    desk = Desk(cost_s=SLICE_S * 0.6)
    assert indexes(desk.decide(*map(item, range(5)))) == [[0, 1], [2, 3], [4]]


def test_sending_a_slice_is_no_part_of_the_next() -> None:
    desk = Desk(cost_s=SLICE_S * 0.6)
    messages = desk.messages(*map(item, range(4)))
    next(messages)
    desk.now_s += 1.0
    assert len(next(messages).results) == 2


@pytest.mark.parametrize("items", [[], [cancel(1)], [cancel(1), cancel(2)]])
def test_a_batch_with_nothing_to_answer_is_answered_all_the_same(
    items: list[router_pb2.RouteItem],
) -> None:
    assert indexes(Desk().decide(*items)) == [[]]


def test_an_item_whose_time_is_over_is_refused_and_reserves_nothing() -> None:
    desk = Desk(cost_s=0.010)
    messages = desk.decide(
        item(0, timeout_ms=1), item(1, timeout_ms=10), item(2, timeout_ms=21), item(3)
    )
    results = [result for message in messages for result in message.results]
    kinds = ["response", "status", "response", "response"]
    assert [one.WhichOneof("result") for one in results] == kinds
    refused = taken_apart(results[1].status)
    assert (refused.code.name, refused.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert desk.fleet.core.reservations.of_request("r1") is None


def test_a_cancel_ends_what_its_item_reserved_once() -> None:
    desk = Desk()
    desk.decide(item(0), item(1), cancel(0), cancel(0), cancel(9))
    desk.decide(cancel(1))
    assert desk.cancelled == ["r0", "r1"]


def test_a_message_that_could_not_be_sent_leaves_nothing_reserved() -> None:
    desk = Desk(cost_s=SLICE_S * 0.6)
    messages = desk.items.decide(batch_of(*map(item, range(6))))
    next(messages)
    next(messages)  # so the first one was sent
    messages.close()
    assert desk.unsent == ["r2", "r3"]


def test_nor_does_an_item_of_a_message_that_was_not_even_made() -> None:
    desk = Desk()
    batch = batch_of(*map(item, range(3)))
    broken = RuntimeError("as planned")

    def route(content: bytes | None, left_s: float) -> Steps:
        if request_codec.receive(content, 1 << 20).request_id == "r2":
            raise broken
        return (yield from desk.route(content, left_s))

    desk.items._route = route
    with pytest.raises(RuntimeError) as caught, closing(desk.items.decide(batch)) as messages:
        list(messages)
    assert (caught.value, desk.unsent) == (broken, ["r0", "r1"])


def test_a_long_item_that_is_given_up_halfway_ends_there() -> None:
    desk, ended = Desk(cost_s=SLICE_S), []

    def long(_content: bytes | None, _left_s: float) -> Steps:
        try:
            while True:
                desk.now_s += SLICE_S
                yield
        finally:
            ended.append("the long item")

    desk.items._route = long
    with closing(desk.items.decide(batch_of(item(0), item(1)))) as messages:
        assert [next(messages) for _ in range(3)] == [None] * 3, "others have their turns"
    assert (ended, desk.unsent, list(messages)) == (["the long item"], [], [])


def test_what_was_cancelled_before_is_not_ended_again() -> None:
    desk = Desk()
    messages = desk.items.decide(batch_of(item(0), item(1), cancel(0)))
    next(messages)
    messages.close()
    assert (desk.cancelled, desk.unsent) == (["r0"], ["r1"])


def test_messages_that_were_sent_keep_their_reservations() -> None:
    desk = Desk(cost_s=SLICE_S * 0.6)
    desk.decide(*map(item, range(5)))
    desk.items.close()
    assert (desk.unsent, len(desk.fleet.core.reservations)) == ([], 5)


def test_a_refused_item_has_nothing_to_cancel() -> None:
    desk = Desk()
    bad = router_pb2.RouteItem(index=1, request=router_pb2.RouteRequest(model="none"))
    desk.decide(bad, cancel(1))
    assert desk.cancelled == []


@pytest.mark.parametrize("again", ["refused", "repeated", "too late"])
def test_a_cancel_means_the_last_item_of_its_index(again: str) -> None:
    desk = Desk(cost_s=0.010)
    desk.decide(item(0))
    later = {
        "refused": [router_pb2.RouteItem(index=0, request={"model": "none"})],
        "repeated": [item(0)],
        "too late": [item(1), item(0, name="other", timeout_ms=1)],
    }[again]
    desk.decide(*later, cancel(0))
    assert desk.cancelled == []


def test_an_index_that_is_used_again_is_among_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_stream, "CANCELLABLE_MAX", 2)
    desk = Desk()
    desk.decide(item(0), item(1), item(0, name="again"), item(2))
    desk.decide(cancel(0), cancel(1), cancel(2))
    assert desk.cancelled == ["again", "r2"]


def test_a_cancel_leaves_a_reservation_that_another_item_shares() -> None:
    desk = Desk()
    desk.decide(item(0, "same"), item(1, "same"), cancel(0), cancel(1))
    assert desk.cancelled == []


def test_answers_that_can_be_cancelled_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_stream, "CANCELLABLE_MAX", 3)
    desk = Desk()
    desk.decide(*map(item, range(5)))
    assert list(desk.items._answered) == [2, 3, 4]
    desk.decide(*map(cancel, range(5)))
    assert desk.cancelled == ["r2", "r3", "r4"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["route", "refused", "late", "empty", "cancel"]), st.integers(0, 5)
        ),
        max_size=40,
    ),
    st.sampled_from([0.0, 0.0005, 0.003]),
)
def test_every_item_but_a_cancel_is_answered_once_and_in_order(
    kinds: list[tuple[str, int]], cost_s: float
) -> None:
    def made() -> Iterator[router_pb2.RouteItem]:
        for i, (kind, earlier) in enumerate(kinds):
            match kind:
                case "cancel":
                    yield cancel(earlier)
                case "empty":
                    yield router_pb2.RouteItem(index=i)
                case "refused":
                    request = router_pb2.RouteRequest(model="none")
                    yield router_pb2.RouteItem(index=i, request=request)
                case _:
                    yield item(i, timeout_ms=1 if kind == "late" else 0)

    desk = Desk(cost_s=cost_s)
    messages = desk.decide(*made())
    assert messages
    assert all(message.results for message in messages[1:])
    answered = [index for message in indexes(messages) for index in message]
    assert answered == [i for i, (kind, _) in enumerate(kinds) if kind != "cancel"]


def test_a_batch_is_put_in_order_without_protobuf() -> None:
    halves = [
        router_pb2.RouteItem(index=7, request=router_pb2.RouteRequest(**about))
        for about in ({"request_id": "r"}, {"model": "m"})
    ]
    content = b"".join(one.SerializeToString() for one in halves)  # a message in two parts
    odd = b"\x0a" + bytes([len(content)]) + content + b"\x9a\x06\x01x"  # and a field of the future
    batch = read_batch(odd)
    assert (len(batch), batch.next(), batch.index) == (1, True, 7)
    assert batch.request is not None
    request = router_pb2.RouteRequest.FromString(batch.request)
    assert (request.request_id, request.model) == ("r", "m")
    assert not batch.next()


ODD = [
    b"\x0b\x0c",  # a group
    b"\x12\x00",  # a request that goes on
    b"\x12\x03\x12\x01x",
    b"\x18\x01",  # a cancel, which takes its place
    b"\x08\x05",  # another index
    b"\x9a\x06\x01x",  # a field of the future
    b"\x0b\x13\x14\x0c",  # a group in a group
    b"\x88\x80\x00\x07",  # a tag longer than need be
    b"\x20" + b"\xff" * 9 + b"\x7f",  # a varint of more than 64 bits
]


def read_both(content: bytes) -> Iterator[tuple[bytes | None, router_pb2.RouteItem]]:
    """Of each item the request's bytes, and the item as protobuf reads it. All else is equal."""
    batch = read_batch(content)
    for one in router_pb2.RouteBatch.FromString(content).items:
        assert batch.next()
        assert (batch.index, batch.timeout_ms) == (one.index, one.timeout_ms)
        assert batch.cancel == (one.WhichOneof("action") == "cancel")
        yield batch.request, one
    assert not batch.next()


@given(st.lists(st.lists(st.sampled_from(ODD), max_size=5), max_size=4))
def test_an_odd_batch_is_read_as_protobuf_reads_it(items: list[list[bytes]]) -> None:
    content = b""
    for n, parts in enumerate(items):
        item = router_pb2.RouteItem(index=n, request=router_pb2.RouteRequest(request_id=f"r{n}"))
        inner = item.SerializeToString() + b"".join(parts)
        content += b"\x0a" + bytes([len(inner)]) + inner
    assert len(read_batch(content)) == len(items)
    for request, expected in read_both(content):
        assert expected.HasField("request") == (request is not None)
        assert request is None or router_pb2.RouteRequest.FromString(request) == expected.request


def test_a_tag_of_six_bytes_is_none_as_in_protobuf() -> None:
    item = b"\x88\x80\x80\x80\x80\x00\x07"
    content = b"\x0a" + bytes([len(item)]) + item
    with pytest.raises(DecodeError):
        router_pb2.RouteBatch.FromString(content)
    with pytest.raises(Refusal, match="no valid RouteBatch"):
        read_batch(content)


@pytest.mark.parametrize(
    "item",
    [
        b"\x0a\x00",
        b"\x0a\x02\x0b\x0c",
        b"\x0b\x0c",
        b"\x0a\x06\x12\x00\x12\x00\x12\x00",
        b"\x10\x01",
    ],
)
def test_a_batch_of_too_many_items_or_fields_is_refused_by_its_bytes(item: bytes) -> None:
    with pytest.raises(Refusal, match="at most 4096 are taken"):
        read_batch(item * (1 << 16))


def test_a_broken_request_ends_its_item_and_no_other() -> None:
    items = [item(0), item(1), item(2)]
    content = router_pb2.RouteBatch(items=items).SerializeToString()
    content = content.replace(b"\x0a\x02r1", b"\x0a\x05r1")  # longer than what is there
    desk = Desk()
    results = []
    for message in desk.items.decide(read_batch(content)):
        assert message is not None
        results += router_pb2.RouteResults.FromString(message).results
    assert [one.WhichOneof("result") for one in results] == ["response", "status", "response"]


def test_bytes_that_are_no_batch_are_refused() -> None:
    with pytest.raises(Refusal, match="no valid RouteBatch") as caught:
        read_batch(b"\x0a\x05\x08")
    assert caught.value.reason is Reason.INVALID_FIELD


@given(st.binary(max_size=40))
def test_a_batch_is_read_as_protobuf_reads_it(content: bytes) -> None:
    try:
        router_pb2.RouteBatch.FromString(content)
    except DecodeError:
        return  # what is in a request is looked at when its turn comes
    for request, expected in read_both(content):
        assert (request is not None) == expected.HasField("request")


class TestResultsThatComeLater:
    """Items that waited: what of their results was sent when the stream breaks."""

    def stream(self) -> tuple[Desk, list[Later]]:
        """Two items that wait."""
        desk, jobs = Desk(), [Later(), Later()]
        waiting = iter(jobs)

        def route(content: bytes | None, left_s: float) -> Steps:
            yield from ()
            return next(waiting)

        desk.items._route = route
        desk.decide(*map(item, range(2)))
        return desk, jobs

    def answer(self, desk: Desk, job: Later, name: str) -> None:
        steps = desk.route(RouteRequest(request_id=name).SerializeToString(), 1.0)
        with pytest.raises(StopIteration) as over:
            next(steps)
        job.outcome = over.value.value
        job.settle()

    def test_a_message_that_was_not_taken_leaves_nothing_reserved(self) -> None:
        desk, jobs = self.stream()
        self.answer(desk, jobs[0], "r0")
        desk.items.close()
        assert desk.unsent == ["r0"]

    def test_nor_does_one_whose_write_broke(self) -> None:
        desk, jobs = self.stream()
        self.answer(desk, jobs[0], "r0")
        assert desk.items.take_late()
        self.answer(desk, jobs[1], "r1")
        desk.items.close()
        assert desk.unsent == ["r0", "r1"]

    def test_a_second_item_of_an_index_ends_the_wait_of_the_first_and_gets_the_cancel(self) -> None:
        desk, jobs = self.stream()
        left: list[Later] = []
        desk.items._leave = left.append
        desk.items._route = desk.route
        desk.decide(item(0, "second"))
        assert (left, desk.items.waiting) == ([jobs[0]], 1)
        desk.decide(cancel(0))
        assert desk.cancelled == ["second"]
        self.answer(desk, jobs[0], "first")
        assert desk.items.take_late() is None

    def test_one_that_was_sent_keeps_its_reservation(self) -> None:
        desk, jobs = self.stream()
        self.answer(desk, jobs[0], "r0")
        assert desk.items.take_late()
        assert desk.items.take_late() is None
        desk.items.close()
        assert desk.unsent == []


class TestWhereItemsStand:
    def waiting(self, count: int) -> tuple[RouteItems, list[Waiting]]:
        """Items that wait, and whose callers want to hear where they stand."""
        jobs: list[Waiting] = []

        def route(content: bytes | None, left_s: float) -> Steps:
            yield from ()
            unused: Any = None
            jobs.append(Waiting(b"", "", None, None, unused, lambda *_: None, tells=True))
            return jobs[-1]

        items = RouteItems(
            route,
            lambda _: None,
            outlook=lambda one: QueueProgress(ahead=jobs.index(one), waited_ms=1500),
        )
        wanted = [RouteItem(index=index, request=RouteRequest()) for index in range(count)]
        content = RouteBatch(items=wanted).SerializeToString()
        assert not any(items.decide(Batch(content)))
        return items, jobs

    def test_a_message_has_so_many_items_and_the_next_one_the_others(self) -> None:
        items, jobs = self.waiting(TOLD_MAX + 1)
        assert [len(told(items)) for _ in range(2)] == [TOLD_MAX, TOLD_MAX]
        assert told(items)[0].index == TOLD_MAX - 1
        jobs[0].refuse(Refusal(Reason.QUEUE_TIMEOUT, "over"))
        assert 0 not in {one.index for _ in range(2) for one in told(items)}

    def test_an_item_that_is_cancelled_is_told_of_no_more(self) -> None:
        items, _ = self.waiting(1)
        cancel = RouteBatch(items=[RouteItem(index=0, cancel=True)]).SerializeToString()
        list(items.decide(Batch(cancel)))
        assert items.take_told() is None

    def test_a_stream_that_is_over_tells_nothing(self) -> None:
        items, _ = self.waiting(2)
        items.close()
        assert items.take_told() is None


def told(items: RouteItems) -> list[RouteResult]:
    message = items.take_told()
    assert message is not None
    return list(RouteResults.FromString(message).results)
