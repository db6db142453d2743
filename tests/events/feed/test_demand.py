"""What waits in routers, told with their in-flight messages."""

from typing import Any

import msgspec
import pytest

from events.feed.demand import DEMANDS_MAX, NAME_BYTES_MAX, TENANTS_MAX, Demand, entries
from events.feed.replicas import TTL_S, Replicas, Teller, decode_inflight
from events.plane.facts import Epoch, Unreadable

EPOCH = Epoch(1, 0)


def told(demand: list[Demand], now_s: float = 100.0, teller: Teller | None = None) -> bytes:
    message = (teller or Teller("them", EPOCH)).message({}, now_s, demand=demand)
    assert message is not None
    return message


def test_what_waits_in_a_replica_is_known_until_it_says_otherwise_or_falls_silent() -> None:
    replicas, teller = Replicas("us"), Teller("them", EPOCH)
    here = Demand("m", "both", 10, 3, 1.5, 7, -0.5, ((5, 2),))
    replicas.on_message(told([here], teller=teller), 100.0)
    assert replicas.demand() == {"them": (here,)}
    changes = replicas.demands
    replicas.on_message(told([], 100.1, teller), 100.1)
    assert replicas.demand() == {}
    assert replicas.demands == changes + 1
    replicas.on_message(told([here], 100.2, teller), 100.2)
    replicas.tick(100.2 + TTL_S)
    assert replicas.demand() == {"them": (here,)}
    replicas.tick(100.3 + TTL_S)
    assert replicas.demand() == {}
    assert replicas.demands == changes + 3


def test_a_restarted_replica_has_nothing_waiting() -> None:
    replicas = Replicas("us")
    replicas.on_message(told([Demand("m", "both", 0, 3)]), 100.0)
    replicas.on_message(told([], teller=Teller("them", Epoch(2, 0))), 100.1)
    assert replicas.demand() == {}


def test_a_message_goes_when_more_or_less_waits_and_not_as_it_ages() -> None:
    teller = Teller("us", EPOCH)
    one = Demand("m", "both", 0, 3, 1.0)
    assert teller.message({}, 100.0, demand=[one]) is not None
    assert teller.message({}, 100.1, demand=[one._replace(oldest_s=1.1, credit=0.4)]) is None
    assert teller.message({}, 100.2, demand=[one._replace(waiting=4)]) is not None
    assert teller.message({}, 100.3, demand=[one._replace(waiting=4, credit=0.9)]) is not None
    assert teller.message({}, 100.4) is not None
    assert teller.message({}, 100.5) is None


def test_a_message_has_a_bounded_number_of_entries_and_tenants() -> None:
    tenants = tuple((number, 1) for number in range(TENANTS_MAX + 1))
    many = [
        Demand(f"m{number}", "both", 0, number + 1, tenants=tenants)
        for number in range(DEMANDS_MAX + 2)
    ]
    sent = entries(many)
    assert len(sent) == DEMANDS_MAX
    assert min(entry.waiting for entry in sent) == 3, "those with the fewest are left out"
    assert {len(entry.tenants) for entry in sent} == {TENANTS_MAX}
    assert entries([Demand("m" * (NAME_BYTES_MAX + 1), "both", 0, 1)]) == []
    largest = Demand("m" * NAME_BYTES_MAX, "both", 0, 1, tenants=((2**64 - 1, 1),) * TENANTS_MAX)
    assert len(told([largest] * DEMANDS_MAX)) < 56 * 1024


@pytest.mark.parametrize(
    ("place", "value"),
    [(2, 1 << 40), (3, 0), (3, -1), (4, -1.0), (5, -1), (6, 1e9), (7, [[-1, 1]]), (7, [[1, -1]])],
)
def test_an_entry_that_makes_no_sense_makes_a_message_unreadable(place: int, value: Any) -> None:
    plain = msgspec.msgpack.decode(told([Demand("m", "both", 0, 3, 0.0, 0, 0.0, ((1, 1),))]))
    plain["demand"][0][place] = value
    assert isinstance(decode_inflight(msgspec.msgpack.encode(plain)), Unreadable)
