"""Subscriptions of one owner: failures cost a message or a pause, and all end together."""

import random

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.plane import supervisor as supervisor_module
from events.plane.listening import Listening
from events.plane.supervisor import Supervisor
from tests.stage.waiting import until
from tests.stage.wire import Wire


class Heard:
    """A listener that keeps what came, and fails at b"bad"."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    async def __call__(self, message: Msg) -> None:
        if message.data == b"bad":
            raise ValueError("bad message")
        self.data.append(message.data)


async def test_a_listener_that_raises_costs_its_message() -> None:
    wire, heard, supervisor = Wire(), Heard(), Supervisor("w", random.Random(1))
    await Listening().listen(wire, "a", heard, "work", supervisor)
    for data in (b"1", b"bad", b"2"):
        await wire.say("a", data)
    assert heard.data == [b"1", b"2"]
    assert supervisor.failures == {"work": 1}
    assert supervisor.troubles() == {"work": "ValueError: bad message"}


async def test_a_refused_subscription_is_retried_and_others_are_made_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_S", 0.001)
    wire, heard, supervisor = Wire(), Heard(), Supervisor("w", random.Random(1))
    refusals = 2

    def refuse(subject: str) -> None:
        nonlocal refusals
        if subject == "a" and refusals:
            refusals -= 1
            raise OSError("refused")

    wire.on_subscribe = refuse
    listening = Listening()
    await listening.listen(wire, "a", heard, "work", supervisor)
    await listening.listen(wire, "b", heard, "work", supervisor)
    assert wire.hears("b")
    await until(lambda: wire.hears("a"), "the subscription")
    assert supervisor.failures == {"work": 2}
    await listening.close()
    assert not wire.listeners


async def test_all_end_though_one_fails_to(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, supervisor, listening = Wire(), Supervisor("w", random.Random(1)), Listening()
    for subject in "abc":
        await listening.listen(wire, subject, Heard(), "work", supervisor)
    ends = wire.unsubscribe

    async def unsubscribe(subscription: Subscription) -> None:
        await ends(subscription)
        if subscription.subject == "b":
            raise OSError("gone")

    monkeypatch.setattr(wire, "unsubscribe", unsubscribe)
    with pytest.raises(OSError, match="gone"):
        await listening.close()
    assert not wire.listeners


async def test_unread_messages_are_counted_by_work() -> None:
    wire, supervisor, listening = Wire(), Supervisor("w", random.Random(1)), Listening()
    for subject, work in (("a", "events"), ("b", "events"), ("c", "load")):
        await listening.listen(wire, subject, Heard(), work, supervisor)
    for waiting, (subscription, _) in enumerate(wire.listeners, start=1):
        subscription.pending_msgs = waiting
    assert [listening.unread(work) for work in ("events", "load", "none")] == [3, 3, 0]
