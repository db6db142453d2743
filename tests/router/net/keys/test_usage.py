"""Limits of an identity, each at its bound."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.net.keys.door import IDENTITIES_SHOWN
from router.net.keys.identity import Allowance, Identity
from router.net.keys.usage import MIB, PRUNE_S, Usage
from router.request.refusal import Reason, Refusal
from tests.stage.keys import a_door, identity, write_keys


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Reservation:
    id: str
    ended: str | None = None


def usage(clock: Clock, **limits: float) -> Usage:
    return Usage(Identity("a", limits=Allowance(**limits)), clock)  # type: ignore[arg-type]


def limit_of(refusal: Refusal) -> str:
    assert refusal.reason is Reason.KEY_LIMIT
    return refusal.metadata["limit"]


def test_requests_a_second_are_bounded_and_come_back_with_time() -> None:
    clock = Clock()
    caller = usage(clock, requests_per_s=10)
    for _ in range(10):
        caller.request()
    with pytest.raises(Refusal) as refused:
        caller.request()
    assert limit_of(refused.value) == "requests_per_s"
    assert refused.value.retry_after_s == pytest.approx(0.1)
    clock.now_s += 0.11
    caller.request()


def test_a_rate_under_one_a_second_lets_one_pass_at_a_time() -> None:
    clock = Clock()
    caller = usage(clock, requests_per_s=0.5)
    caller.request()
    with pytest.raises(Refusal) as refused:
        caller.request()
    assert refused.value.retry_after_s == pytest.approx(2.0)
    clock.now_s += 2.0
    caller.request()


def test_open_reservations_are_bounded_and_ended_ones_make_room() -> None:
    clock = Clock()
    caller = usage(clock, reservations=2)
    held = [Reservation("1"), Reservation("2")]
    for reservation in held:
        caller.request()
        caller.reserved(reservation)
    with pytest.raises(Refusal) as refused:
        caller.request()
    assert limit_of(refused.value) == "reservations"
    held[0].ended = "finished"
    clock.now_s += 2 * PRUNE_S
    caller.request()


def test_streams_are_bounded_and_counted_down_whatever_ends_them() -> None:
    caller = usage(Clock(), streams=1)
    with suppress(KeyError), caller.stream():
        with pytest.raises(Refusal) as refused, caller.stream():
            pass
        assert limit_of(refused.value) == "streams"
        raise KeyError
    with caller.stream():
        assert caller.streams == 1
    assert caller.streams == 0


def test_bytes_a_second_are_bounded_and_a_large_message_makes_the_next_ones_wait() -> None:
    clock = Clock()
    caller = usage(clock, mib_per_s=1)
    caller.message(3 * MIB)  # larger than a second's bytes: it passes while nothing else came
    with pytest.raises(Refusal) as refused:
        caller.message(1)
    assert limit_of(refused.value) == "mib_per_s"
    clock.now_s += 2.1
    caller.message(1)


def test_without_limits_nothing_is_kept() -> None:
    caller = usage(Clock())
    for _ in range(1000):
        caller.request()
        caller.message(MIB)
    caller.reserved(Reservation("1"))
    assert not caller._open
    assert not caller.identity.is_bounded


def test_a_changed_identity_keeps_what_it_uses(tmp_path: Path) -> None:
    clock = Clock()

    def entry(models: str, **limits: float) -> dict[str, Any]:
        return identity("a", models=[models], limits={"streams": 1, **limits})

    door = a_door(tmp_path, entry("x", requests_per_s=4, reservations=1), clock=clock)
    caller = door.enter("a-token", tuple, is_unix=False)
    caller.request()
    caller.reserved(Reservation("1"))
    with caller.stream():
        write_keys(tmp_path, entry("y", requests_per_s=2, reservations=2, mib_per_s=1))
        assert door.reload()
        changed = door.enter("a-token", tuple, is_unix=False)
        assert changed.identity.may_use("y")
        with pytest.raises(Refusal) as refused, changed.stream():
            raise AssertionError("a second stream")
        assert limit_of(refused.value) == "streams"
    changed.request()
    changed.reserved(Reservation("2"))
    clock.now_s += 2 * PRUNE_S
    with pytest.raises(Refusal) as refused:
        changed.request()
    assert limit_of(refused.value) == "reservations"
    write_keys(tmp_path, entry("y", requests_per_s=2))
    assert door.reload()
    door.enter("a-token", tuple, is_unix=False).request()
    with pytest.raises(Refusal) as refused:
        changed.request()
    assert limit_of(refused.value) == "requests_per_s"
    changed.message(3 * MIB)


def test_metrics_name_the_identities_at_their_limits_up_to_a_bound(tmp_path: Path) -> None:
    names = [f"i{number}" for number in range(IDENTITIES_SHOWN + 2)]
    limits = {"streams": 1}
    door = a_door(tmp_path, *(identity(name, limits=limits) for name in names))
    for number, name in enumerate(names):
        usage = door.enter(f"{name}-token", tuple, is_unix=False)
        with usage.stream():
            for _ in range(number + 1):
                with pytest.raises(Refusal), usage.stream():
                    raise AssertionError("a second stream")
    refused = door.refused()
    assert len(refused) == IDENTITIES_SHOWN + 1
    assert refused["other", "streams"] == 1 + 2, "of those with the fewest"
    assert refused[names[-1], "streams"] == len(names)
    assert sum(refused.values()) == sum(range(1, len(names) + 1))
