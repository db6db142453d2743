"""Places of a port: a model of them, driven by generated arrivals, beginnings and ends."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from router.net.listener.connections import FREE_TIMES, Connections, Place, PortBounds

BEGIN_S = 20.0


@dataclass
class Server:
    """What serves a connection."""

    begun: bool = False
    idle: bool = False


@dataclass
class Model:
    """A port's open places, the oldest first."""

    bounds: PortBounds
    port: Connections = field(init=False)
    open: list[Place] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.port = Connections("a", self.bounds)

    def of(self, client: str) -> int:
        return sum(place.client == client for place in self.open)

    def arrive(self, client: str) -> None:
        held, free = self.of(client), self.bounds.connections_max - len(self.open)
        closed = sum(self.port.closed.values())
        place, left = self.port.admit(client, self.now_s)
        closed = sum(self.port.closed.values()) - closed
        waiting = [each for each in self.open if not each.begun]
        own = [each for each in waiting if each.client == client]
        idle = self.idle()
        own_idle = [each for each in idle if each.client == client]
        address_max = self.bounds.address_max or self.bounds.connections_max + 1
        if held >= address_max or (free and held >= FREE_TIMES * free):
            assert left is own[0] if own else left in (own_idle or [None])
            assert (place is None, closed) == (left is None, 1)
        elif free:
            assert (place is None, left, closed) == (False, None, 0)
        else:
            assert (place is None, closed) == (left is None, 1)
            most = max((self.of(each.client) for each in waiting + idle), default=0)
            if left is not None:
                assert self.of(left.client) == most
                others = [each for each in waiting if self.of(each.client) == most]
                assert left is others[0] if others else left in idle
                assert left.client == client or most > held
            else:
                assert most <= held
        if left is not None:
            self.open.remove(left)
        if place is not None:
            self.open.append(place)

    def host_is_full(self, _: int) -> None:
        waiting = [each for each in self.open if not each.begun] + self.idle()
        closed = self.port.closed["full"]
        place = self.port.give_up_one()
        assert self.port.closed["full"] - closed == (place is not None) == bool(waiting)
        if place is not None:
            assert self.of(place.client) == max(self.of(each.client) for each in waiting)
            self.open.remove(place)

    def idle(self) -> list[Place]:
        servers = [(place, place.served_by) for place in self.open]
        return [place for place, server in servers if server is not None and server.idle]

    def begin(self, number: int) -> None:
        if self.open:
            self.open[number % len(self.open)].served_by = Server(begun=True, idle=number % 3 == 0)

    def handshake(self, number: int) -> None:
        if self.open:
            place = self.open[number % len(self.open)]
            place.served_by = place.served_by or Server()

    def leave(self, number: int) -> None:
        if self.open:
            place = self.open.pop(number % len(self.open))
            self.port.leave(place)
            self.port.leave(place)  # a second end changes nothing

    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        closed = self.port.closed["slow_head"]
        late = []
        while self.port.late_s is not None and self.port.late_s <= self.now_s:
            late += self.port.late(self.now_s, 3)
        due = [p for p in self.open if not p.begun and p.until_s <= self.now_s]
        assert late == due
        assert self.port.closed["slow_head"] == closed + len(due)
        self.open = [place for place in self.open if place not in due]

    def check(self) -> None:
        assert self.port.open == len(self.open) <= self.bounds.connections_max
        assert self.port.incomplete == sum(not place.begun for place in self.open)
        assert self.port.most_of_one == max((self.of(p.client) for p in self.open), default=0)
        assert self.port.unserved() == [p for p in self.open if p.served_by is None]
        if self.bounds.address_max is not None:
            assert self.port.most_of_one <= self.bounds.address_max


STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from("aaaabbc")),
    st.tuples(st.sampled_from(("begin", "handshake", "leave", "host_is_full")), st.integers(0, 50)),
    st.tuples(st.just("pass_time"), st.integers(0, 15)),
)


@given(st.integers(1, 20), st.one_of(st.none(), st.integers(1, 8)), st.lists(STEPS, max_size=120))
@settings(max_examples=300)
def test_places_are_as_the_laws_say(
    connections_max: int, address_max: int | None, steps: list[tuple[str, object]]
) -> None:
    model = Model(PortBounds(connections_max, address_max, BEGIN_S))
    for name, about in steps:
        getattr(model, name)(about)
        model.check()
    while model.open:
        model.leave(0)
    model.check()
    assert not model.port._clients
    assert not model.port._waiting
    assert not model.port._begun


@given(st.integers(2, 10_000))
@settings(max_examples=50)
def test_one_client_leaves_room_for_another_and_has_most_of_the_port(connections_max: int) -> None:
    port = Connections("a", PortBounds(connections_max))
    held = 0
    for _ in range(connections_max + 5):
        place, left = port.admit("a", 0.0)
        if place is not None and left is None:
            place.served_by = Server(begun=True)
            held += 1
    assert held >= min(connections_max * FREE_TIMES // (FREE_TIMES + 1), connections_max - 1)
    assert held < connections_max or connections_max < FREE_TIMES + 1
    assert (held < connections_max) == (port.admit("b", 0.0)[0] is not None)


async def test_a_wait_for_the_last_connection_ends_with_it_or_with_its_time() -> None:
    port = Connections("a", PortBounds(10))
    place, _ = port.admit("a", 0.0)
    assert place is not None
    await port.none_left(0.001)
    assert port.open == 1
    port.leave(place)
    await port.none_left(60.0)
