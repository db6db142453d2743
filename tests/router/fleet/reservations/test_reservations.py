"""Reservations: open until exactly one thing ends them, remembered for a while, bounded."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indexer.identity import WorkerKey
from router.fleet.reservations.reservations import Ending, Reservation, Reservations
from tests.stage.fleet import hashes

WORKER = WorkerKey("w0", 0)
OTHER = WorkerKey("w1", 0)
LEASE_S = 120.0
WINDOW_S = 60.0


def reservation(
    number: int, *, request: str = "", worker: WorkerKey = WORKER, now_s: float = 0.0
) -> Reservation:
    return Reservation(
        id=f"r{number}",
        request_id=request or f"q{number}",
        worker=worker,
        fingerprint=(1, 16, "m", "both"),
        prefixes=hashes([]),
        own_blocks=1,
        prompt_tokens=8,
        predicted_tokens=0,
        new_tokens=8,
        opened_at_s=now_s,
        lease_ends_s=now_s + LEASE_S,
        answer=b"",
    )


def some(count: int, entries_max: int = 100) -> tuple[Reservations, list[Reservation]]:
    """Reservations, a second apart."""
    all_of_them = Reservations(WINDOW_S, entries_max)
    made = [reservation(i, now_s=float(i)) for i in range(count)]
    for one in made:
        all_of_them.add(one)
    return all_of_them, made


def test_an_open_one_is_found_by_its_id_and_by_its_request() -> None:
    reservations, (one,) = some(1)
    assert reservations.get("r0") is one
    assert reservations.of_request("q0") is one
    assert reservations.get("r9") is None
    assert reservations.of_request("q9") is None
    assert len(reservations) == 1


def test_a_finished_one_is_remembered_by_both_and_open_no_more() -> None:
    reservations, (one,) = some(1)
    reservations.end(one, Ending.FINISHED, 5.0)
    assert one.ended is Ending.FINISHED
    assert len(reservations) == 0
    assert reservations.get("r0") is one
    assert reservations.of_request("q0") is one


@pytest.mark.parametrize("ending", [one for one in Ending if one is not Ending.FINISHED])
def test_one_that_did_not_finish_leaves_its_request_free_to_be_routed_anew(ending: Ending) -> None:
    reservations, (one,) = some(1)
    reservations.end(one, ending, 5.0)
    assert reservations.of_request("q0") is None
    assert reservations.get("r0") is one, "a Report told twice is still understood"
    again = reservation(1, request="q0")
    reservations.add(again)
    assert reservations.of_request("q0") is again
    reservations.forget_old(1000.0)
    assert reservations.of_request("q0") is again, "the memory of the first takes nothing along"
    assert reservations.get("r0") is None


def test_one_can_end_only_once() -> None:
    reservations, (one,) = some(1)
    reservations.end(one, Ending.FINISHED, 5.0)
    with pytest.raises(KeyError):
        reservations.end(one, Ending.EXPIRED, 6.0)


def test_leases_expire_in_their_order_and_a_renewed_one_last() -> None:
    reservations, made = some(4)
    assert reservations.expired(LEASE_S - 0.001) == []
    assert reservations.expired(LEASE_S) == [made[0]]
    assert reservations.expired(LEASE_S + 2) == made[:3]
    reservations.renew(made[0], 50.0 + LEASE_S)
    assert reservations.expired(LEASE_S + 3) == made[1:]
    assert reservations.expired(LEASE_S + 50) == [*made[1:], made[0]]


def test_looking_for_the_expired_ends_nothing() -> None:
    reservations, made = some(2)
    assert reservations.expired(1000.0) == reservations.expired(1000.0) == made
    assert len(reservations) == 2


def test_memory_lasts_for_the_window_and_no_longer() -> None:
    reservations, made = some(2)
    reservations.end(made[0], Ending.FINISHED, 10.0)
    reservations.end(made[1], Ending.FINISHED, 20.0)
    reservations.forget_old(10.0 + WINDOW_S - 0.001)
    assert reservations.of_request("q0") is made[0]
    reservations.forget_old(10.0 + WINDOW_S)
    assert reservations.of_request("q0") is None
    assert reservations.get("r0") is None
    assert reservations.of_request("q1") is made[1]


def test_an_open_one_is_never_forgotten() -> None:
    reservations, (one,) = some(1)
    reservations.forget_old(1e9)
    assert reservations.get("r0") is one


def test_at_the_bound_the_oldest_memories_go_first_and_open_ones_stay() -> None:
    reservations, made = some(3, entries_max=3)
    assert reservations.full()
    reservations.end(made[1], Ending.FINISHED, 5.0)
    reservations.end(made[0], Ending.FINISHED, 6.0)
    assert not reservations.full()
    reservations.add(reservation(3))
    assert reservations.get("r1") is None
    assert reservations.of_request("q1") is None
    assert reservations.get("r0") is made[0]
    reservations.add(reservation(4))
    assert reservations.get("r0") is None
    assert reservations.full()
    assert [reservations.get(f"r{i}") is not None for i in (2, 3, 4)] == [True] * 3


def test_at_the_bound_of_bytes_memories_go_first_and_then_nobody_gets_in() -> None:
    reservations = Reservations(WINDOW_S, 100, hash_bytes_max=24 * 8)
    made = [reservation(i) for i in range(4)]
    for one in made:
        one.prefixes = hashes(range(8))
    for one in made[:3]:
        assert not reservations.full()
        reservations.add(one)
    assert reservations.full()
    reservations.end(made[0], Ending.FINISHED, 5.0)
    assert not reservations.full()
    assert reservations.get("r0") is made[0], "asking changes nothing"
    reservations.add(made[3])
    assert reservations.get("r0") is None, "its memory has made room"
    assert reservations.full()
    made[1].cached_tokens = 0
    reservations.end(made[1], Ending.FINISHED, 6.0)
    assert not reservations.full()
    assert reservations.get("r1") is made[1], "it holds no hashes any more, so it may stay"


def test_open_ones_of_some_workers_are_found() -> None:
    reservations = Reservations(WINDOW_S, 10)
    made = [reservation(i, worker=(WORKER, OTHER)[i % 2]) for i in range(4)]
    for one in made:
        reservations.add(one)
    reservations.end(made[0], Ending.FINISHED, 1.0)
    assert reservations.on_workers([WORKER]) == [made[2]]
    assert reservations.on_workers([OTHER, WORKER]) == [made[1], made[2], made[3]]
    assert reservations.on_workers([]) == []


def test_a_repr_tells_how_many() -> None:
    reservations, made = some(3)
    reservations.end(made[0], Ending.FAILED_CLIENT, 1.0)
    assert repr(reservations) == "<Reservations 2 open, 1 remembered>"


class LifeOfReservations(RuleBasedStateMachine):
    """Any sequence of calls against lists that are searched from end to end."""

    BOUND = 6

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.made = 0
        self.reservations = Reservations(WINDOW_S, self.BOUND)
        self.open: list[Reservation] = []
        """In the order in which their leases end."""
        self.ended: list[tuple[float, Reservation]] = []

    def named(self, request: str) -> Reservation | None:
        """Whom a request id finds: open, or finished and remembered."""
        finished = [one for _, one in self.ended if one.ended is Ending.FINISHED]
        found = [one for one in (*finished, *self.open) if one.request_id == request]
        return found[-1] if found else None

    @rule(request=st.sampled_from("abcd"), worker=st.sampled_from([WORKER, OTHER]))
    def add(self, request: str, worker: WorkerKey) -> None:
        if self.reservations.full() or self.named(request) is not None:
            return
        self.made += 1
        one = reservation(self.made, request=request, worker=worker, now_s=self.now_s)
        self.reservations.add(one)
        while len(self.open) + len(self.ended) >= self.BOUND:
            self.ended.pop(0)
        self.open.append(one)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.open))
        self.reservations.renew(one, self.now_s + LEASE_S)
        self.open.remove(one)
        self.open.append(one)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ending=st.sampled_from(Ending))
    def end(self, data: st.DataObject, ending: Ending) -> None:
        one = data.draw(st.sampled_from(self.open))
        self.reservations.end(one, ending, self.now_s)
        self.open.remove(one)
        self.ended.append((self.now_s, one))

    @rule(seconds=st.floats(0, 100))
    def time_goes_by(self, seconds: float) -> None:
        self.now_s += seconds
        self.reservations.forget_old(self.now_s)
        self.ended = [(at, one) for at, one in self.ended if self.now_s - at < WINDOW_S]

    @invariant()
    def all_is_found_that_is_there_and_nothing_else(self) -> None:
        assert len(self.reservations) == len(self.open)
        remembered = [one for _, one in self.ended]
        assert len(self.open) + len(remembered) <= self.BOUND
        there = {one.id: one for one in (*self.open, *remembered)}
        for i in range(self.made + 1):
            assert self.reservations.get(f"r{i}") is there.get(f"r{i}")
        for request in "abcd":
            assert self.reservations.of_request(request) is self.named(request)
        due = [one for one in self.open if one.lease_ends_s <= self.now_s]
        assert self.reservations.expired(self.now_s) == due
        assert self.reservations.full() == (len(self.open) >= self.BOUND)


TestLifeOfReservations = LifeOfReservations.TestCase
TestLifeOfReservations.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40
)
