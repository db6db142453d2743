"""Room for requests and bytes: nobody takes another's, and everything is given back."""

import random
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.refusals import GatewayRefusal
from router.gateway.server.pace import BODY_S, GRACE_S, PACE_BYTES_PER_S, wait_s
from router.gateway.server.room import Client, Place, Room, client_of

MIB = 1 << 20


def a_room(**about: float) -> Room:
    settings: dict[str, float] = {"open_max": 10, "bodies_mib_max": 8, "body_mib_max": 2}
    return Room(**(settings | {"share": 0.5} | about))  # type: ignore[arg-type]


def client(name: str) -> Client:
    return Client("key", name)


@given(st.integers(0, 1 << 32))
def test_what_is_held_is_the_sum_of_what_came_and_within_each_bound(seed: int) -> None:
    rng, room = random.Random(seed), a_room()
    places: list[tuple[str, Place, ExitStack]] = []
    refused: set[str] = set()
    for _ in range(200):
        name = rng.choice("abc")
        try:
            match rng.randrange(4):
                case 0:
                    stack = ExitStack()
                    place = stack.enter_context(room.enter(client(name)))
                    places.append((name, place, stack))
                case 1 if places:
                    places.pop(rng.randrange(len(places)))[2].close()
                case 2 if places:
                    rng.choice(places)[1].announced(rng.randrange(3 * MIB))
                case 3 if places:
                    rng.choice(places)[1].add(rng.randrange(MIB))
        except GatewayRefusal as refusal:
            refused.add(refusal.message)
        assert room.open == len(places) <= 10
        assert room.bytes == sum(place.bytes for _, place, _ in places) <= 8 * MIB
        for each in "abc":
            own = [place for name, place, _ in places if name == each]
            assert len(own) <= 5
            assert sum(place.bytes for place in own) <= 4 * MIB
    assert all(
        "this key" in each or "all clients" in each or "over 2 MiB" in each for each in refused
    )
    for _, _, stack in places:
        stack.close()
    assert (room.open, room.bytes, room._holdings) == (0, 0, {})


def test_one_client_leaves_room_for_another_and_is_named() -> None:
    room = a_room()
    with ExitStack() as stack:
        held = [stack.enter_context(room.enter(client("a"))) for _ in range(5)]
        with pytest.raises(GatewayRefusal, match="this key has 5 open requests"):
            room.enter(client("a"))
        for place in held[:2]:
            place.add(2 * MIB)
        with pytest.raises(GatewayRefusal, match="of this key hold 4 MiB") as refused:
            held[2].add(1)
        assert refused.value.reason == "TOO_MANY_BYTES"
        others = [stack.enter_context(room.enter(client("b"))) for _ in range(5)]
        others[0].add(2 * MIB)
        with pytest.raises(GatewayRefusal, match="all clients together have 10"):
            room.enter(client("c"))


def test_a_body_of_the_largest_size_finds_room_however_small_a_share_is() -> None:
    with a_room(bodies_mib_max=1, body_mib_max=2, share=0.01).enter(client("a")) as place:
        place.add(2 * MIB)
        with pytest.raises(GatewayRefusal) as refused:
            place.add(1)
        assert refused.value.reason == "BODY_TOO_LARGE"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:0:0:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, ""),
    ],
)
def test_an_address_names_a_client_that_has_no_key(address: str | None, name: str) -> None:
    assert client_of(None, address) == Client("address", name)
    assert client_of("a", address) == Client("key", "a")


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0.001, 30)), max_size=60))
def test_a_drip_ends_and_a_steady_body_goes_on(parts: list[tuple[int, float]]) -> None:
    """Parts that come after waits: the body ends at the first wait past what its bytes allow."""
    came, waited_s = 0, 0.0
    for size, pause_s in parts:
        if waited_s + pause_s > wait_s(came):
            assert waited_s + pause_s > BODY_S or came < PACE_BYTES_PER_S * (
                waited_s + pause_s - GRACE_S
            )
            return
        waited_s += pause_s
        came += size
    assert waited_s <= BODY_S
    assert came >= PACE_BYTES_PER_S * (waited_s - GRACE_S) - 4096
