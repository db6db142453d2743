"""Shares of a pool's free places between routers, with equal views and with late ones."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decide.queue_turns.pool_share import HOLD_S, REST_S, Band, PoolShare

LOW, HIGH = 0, 1
COUNTS = st.lists(
    st.dictionaries(st.sampled_from([LOW, HIGH]), st.integers(1, 500), min_size=1),
    min_size=2,
    max_size=5,
)


def said(share: PoolShare) -> dict[int, Band]:
    """What a router tells other replicas."""
    return {
        level: replace(band) for level in (LOW, HIGH) if (band := share.ours(level)) is not None
    }


class Routers:
    """Several routers whose requests wait for one pool, and which tell one another."""

    def __init__(
        self, waiting: list[dict[int, int]], *, strict: bool = False, weights: tuple[float, ...]
    ) -> None:
        self.waiting = waiting
        self.weights = weights
        self.shares = [
            PoolShare(f"r{number}", weights, strict=strict) for number in range(len(waiting))
        ]
        self.went: list[tuple[int, int]] = []
        """(router, band) of each request that went."""
        self.tell()

    def tell(self) -> None:
        """All hear all, and then the credits that come of it."""
        for share, waiting in zip(self.shares, self.waiting, strict=True):
            share.wait({level: Band(count) for level, count in waiting.items()})
        for _ in range(2):
            for number, share in enumerate(self.shares):
                for other in self.shares:
                    if other is not share:
                        other.hear(f"r{number}", said(share))

    def may_go(self, free: int, now_s: float = 0.0) -> list[tuple[int, int]]:
        """Routers and bands that may have a place."""
        return [
            (number, level)
            for number, share in enumerate(self.shares)
            for level in sorted(self.waiting[number], reverse=True)
            if share.may_go(level, free, now_s)
        ]

    def take(self, number: int, level: int, *, comes: bool = True) -> None:
        """A request goes, and another comes in its place."""
        self.went.append((number, level))
        self.shares[number].took(level)
        if not comes:
            self.waiting[number][level] -= 1

    def got(self, level: int) -> list[int]:
        return [self.went.count((number, level)) for number in range(len(self.shares))]


@pytest.fixture
def contended() -> PoolShare:
    """50 requests of a low band wait here, and 10 of a higher one at another router."""
    share = PoolShare("us", (1.0, 1.0), strict=True)
    share.wait({LOW: Band(50)})
    share.hear("them", {HIGH: Band(10)})
    return share


def test_while_nothing_waits_elsewhere_all_room_is_ours() -> None:
    share = PoolShare("us", (1.0, 4.0), strict=True)
    share.wait({LOW: Band(7)})
    assert not share.is_contended
    assert share.may_go(LOW, 1, 0.0)
    share.hear("them", {HIGH: Band(1)})
    assert share.is_contended
    assert not share.may_go(LOW, 1, 0.0)
    assert share.may_go(LOW, 2, 0.0), "one place is for the other router's request"
    share.hear("them", {})
    assert share.may_go(LOW, 1, 0.0)


@settings(max_examples=25)
@given(waiting=COUNTS, strict=st.booleans(), places=st.integers(1, 20))
def test_for_one_free_place_one_router_has_the_turn(
    waiting: list[dict[int, int]], strict: bool, places: int
) -> None:
    routers = Routers(waiting, strict=strict, weights=(1.0, 4.0))
    for _ in range(places):
        may = routers.may_go(1)
        assert len({number for number, _ in may}) == 1
        if strict and any(HIGH in bands for bands in waiting):
            assert may[0][1] == HIGH
        routers.take(*may[0])
        routers.tell()


@settings(max_examples=10)
@given(waiting=COUNTS)
def test_a_flow_that_always_waits_gets_its_share_of_any_window(
    waiting: list[dict[int, int]],
) -> None:
    weights = (1.0, 4.0)
    routers = Routers(waiting, weights=weights)
    levels = sorted({level for bands in waiting for level in bands})
    total = {level: sum(bands.get(level, 0) for bands in waiting) for level in levels}
    shares = {
        (number, level): weights[level] / sum(weights[each] for each in levels) * n / total[level]
        for number, bands in enumerate(waiting)
        for level, n in bands.items()
    }
    for _ in range(120):
        # Of a router's own bands the one with the most credit goes, as its queue would say.
        number = routers.may_go(1)[0][0]
        share = routers.shares[number]
        owed = {
            level: band.credit + shares[number, level]
            for level in waiting[number]
            if (band := share.ours(level)) is not None
        }
        routers.take(number, max(owed, key=lambda level: owed[level]))
        routers.tell()
    for begin in range(0, 120, 15):
        for end in range(begin, 121, 15):
            for (number, level), share_ in shares.items():
                got = routers.went[begin:end].count((number, level))
                assert abs(got - share_ * (end - begin)) < 4


@pytest.mark.parametrize("free", [8, 32, 100])
def test_each_takes_its_part_of_many_places_at_once_before_it_hears_of_the_others(
    free: int,
) -> None:
    waiting = [{LOW: 300}, {LOW: 100}, {LOW: 200}, {LOW: 200}]
    routers = Routers(waiting, weights=(1.0, 1.0))
    for number, share in enumerate(routers.shares):
        left = free
        while share.may_go(LOW, left, 0.0):
            routers.take(number, LOW)
            left -= 1
    for got, bands in zip(routers.got(LOW), waiting, strict=True):
        part = free * bands[LOW] / 800
        assert 0.9 * part - 1 <= got <= part + 1


def test_requests_of_a_strictly_higher_band_are_all_in_front(contended: PoolShare) -> None:
    assert [contended.may_go(LOW, free, 0.0) for free in (1, 10, 11)] == [False, False, True]


def test_tenants_have_their_weights_wherever_they_wait() -> None:
    gold, small, big = 11, 22, 33
    share = PoolShare(
        "us", (1.0,), strict=False, weight_of=lambda tenant: 2.0 if tenant == gold else 1.0
    )
    share.wait({LOW: Band(2, tenants={gold: 2})})
    share.hear("them", {LOW: Band(1000, tenants={small: 10, big: 990})})
    went = theirs = 0
    for _ in range(40):
        share.wait({LOW: Band(2, tenants={gold: 2})})
        ours = share.ours(LOW)
        assert ours is not None
        if share.may_go(LOW, 1, 0.0):
            share.took(LOW)
            went += 1
        else:
            theirs += 1
            credit = -0.5 - ours.credit
            share.hear("them", {LOW: Band(1000, theirs, credit, {small: 10, big: 990})})
    assert abs(went - 20) <= 1, "two of four parts"


def test_room_that_a_replica_does_not_take_is_held_for_a_bounded_time(contended: PoolShare) -> None:
    assert not contended.may_go(LOW, 3, 100.0)
    assert not contended.may_go(LOW, 3, 100.0 + 0.9 * HOLD_S)
    assert contended.may_go(LOW, 3, 101.0 + HOLD_S)
    assert contended.rests == 1
    for _ in range(3):
        contended.took(LOW)
    assert contended.may_go(LOW, 1, 101.0 + REST_S), "the claims still rest"
    assert not contended.may_go(LOW, 1, 101.0 + HOLD_S + REST_S)


def test_a_replica_that_takes_its_turns_keeps_its_claims(contended: PoolShare) -> None:
    for number in range(20):
        now_s = 100.0 + 0.9 * HOLD_S * number
        contended.hear("them", {HIGH: Band(10, went=number)})
        assert not contended.may_go(LOW, 1, now_s)
    assert contended.rests == 0


def test_a_full_fleet_leaves_the_replicas_nothing_to_take(contended: PoolShare) -> None:
    assert not contended.may_go(LOW, 1, 100.0)
    contended.filled()
    assert not contended.may_go(LOW, 1, 100.0 + 2 * HOLD_S)
    assert contended.rests == 0


def test_a_rest_ends_once_the_replica_takes_a_request(contended: PoolShare) -> None:
    contended.may_go(LOW, 1, 100.0)
    assert contended.may_go(LOW, 1, 101.0 + HOLD_S)
    contended.hear("them", {HIGH: Band(9, went=1)})
    assert not contended.may_go(LOW, 1, 101.0 + HOLD_S)


def test_a_flow_ends_with_its_last_request_and_with_its_router() -> None:
    share = PoolShare("us", (1.0, 1.0), strict=False)
    share.wait({LOW: Band(1)})
    share.hear("them", {LOW: Band(1, 0, 3.0)})
    share.took(LOW)
    assert share.ours(LOW) is None
    share.hear("them", {})
    share.wait({LOW: Band(1)})
    band = share.ours(LOW)
    assert band is not None
    assert (band.credit <= 0.0, share.is_contended) == (True, False)
