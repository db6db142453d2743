"""What replicas tell one another: absolute totals, in order, for as long as they are heard."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from events import inflight as module
from events.facts import Epoch, Hello, Unreadable, encode
from events.inflight import FULL_S, REPLICAS_MAX, TTL_S, Peers, Teller, Totals, decode_inflight
from indexer.identity import WorkerKey

A, B = WorkerKey("a", 0), WorkerKey("b", 1)
EPOCH = Epoch(1, 0)
NOTHING = Totals()


@dataclass
class Load:
    """What one replica has reserved on one worker, with all of its past."""

    ours: Totals = NOTHING
    history: list[tuple[float, Totals]] = field(default_factory=list)

    def become(self, requests: int, blocks: int, tokens: int, now_s: float) -> None:
        self.ours = Totals(requests, blocks, tokens)
        self.history.append((now_s, self.ours))

    def ours_at(self, times_s: list[float]) -> list[tuple[int, int]]:
        return [self._at(time_s) for time_s in times_s]

    def _at(self, time_s: float) -> tuple[int, int]:
        held = Totals()
        for when_s, totals in self.history:
            if when_s <= time_s:
                held = totals
        return held.requests, held.blocks


def told(teller: Teller, loads: dict[WorkerKey, Load], now_s: float) -> bytes:
    message = teller.message(loads, now_s)
    assert message is not None
    return message


def test_a_peers_totals_arrive_as_they_are_now_and_as_they_were() -> None:
    load, peers = Load(), Peers("us")
    load.become(1, 10, 160, 99.2)
    load.become(3, 25, 400, 99.8)
    assert peers.on_message(told(Teller("them", EPOCH), {A: load}, 100.0), 100.0) == {A}
    assert peers.now(A) == Totals(3, 25, 400)
    assert peers.at(A, 99.0) == (0, 0)
    assert peers.at(A, 99.5) == (1, 10)
    assert peers.at(A, 99.9) == (3, 25)
    assert peers.at(A, 200.0) == (3, 25), "nothing has changed, as far as we know"
    assert peers.now(B) == Totals()
    assert peers.at(B, 99.5) == (0, 0)


def test_only_changes_are_told_between_full_messages() -> None:
    loads = {A: Load(), B: Load()}
    loads[A].become(1, 1, 1, 100.0)
    teller = Teller("them", EPOCH)
    first = decode_inflight(told(teller, loads, 100.0))
    assert not isinstance(first, Unreadable)
    assert first.full
    assert teller.message(loads, 100.1) is None
    loads[B].become(2, 2, 2, 100.2)
    second = decode_inflight(told(teller, loads, 100.2))
    assert not isinstance(second, Unreadable)
    assert not second.full
    assert [one.worker_id for one in second.workers] == ["b"]
    third = decode_inflight(told(teller, loads, 100.0 + FULL_S))
    assert not isinstance(third, Unreadable)
    assert third.full
    assert len(third.workers) == 2


def test_what_ended_is_told_even_when_its_worker_is_forgotten() -> None:
    load, teller, peers = Load(), Teller("them", EPOCH), Peers("us")
    load.become(1, 1, 1, 100.0)
    peers.on_message(told(teller, {A: load}, 100.0), 100.0)
    assert peers.on_message(told(teller, {}, 100.1), 100.1) == {A}
    assert peers.now(A) == Totals()


def test_a_lost_message_is_made_good_by_the_next_full_one() -> None:
    loads = {A: Load(), B: Load()}
    loads[A].become(1, 1, 1, 100.0)
    teller, peers = Teller("them", EPOCH), Peers("us")
    peers.on_message(told(teller, loads, 100.0), 100.0)
    loads[A].become(0, 0, 0, 100.1)
    loads[B].become(5, 5, 5, 100.1)
    told(teller, loads, 100.1)  # lost
    assert peers.now(A).requests == 1
    assert peers.on_message(told(teller, loads, 101.0), 101.0) == {A, B}
    assert (peers.now(A).requests, peers.now(B).requests) == (0, 5)


def test_our_own_messages_are_not_heard() -> None:
    load = Load()
    load.become(1, 1, 1, 100.0)
    peers = Peers("us")
    assert peers.on_message(told(Teller("us", EPOCH), {A: load}, 100.0), 100.0) == set()
    assert len(peers) == 0


def test_a_message_counts_once_and_in_order() -> None:
    load, teller, peers = Load(), Teller("them", EPOCH), Peers("us")
    load.become(1, 1, 1, 100.0)
    first = told(teller, {A: load}, 100.0)
    load.become(2, 2, 2, 100.1)
    second = told(teller, {A: load}, 100.1)
    peers.on_message(second, 100.2)
    assert peers.on_message(first, 100.3) == set()
    assert peers.on_message(second, 100.3) == set()
    assert peers.now(A).requests == 2
    assert peers.results["out_of_order"] == 2


def test_a_replica_that_started_again_begins_with_nothing_and_its_old_life_is_not_heard() -> None:
    load, peers = Load(), Peers("us")
    load.become(7, 7, 7, 100.0)
    old = Teller("them", EPOCH)
    peers.on_message(told(old, {A: load}, 100.0), 100.0)
    assert peers.on_message(told(Teller("them", Epoch(2, 0)), {}, 101.0), 101.0) == {A}
    assert peers.now(A) == Totals()
    peers.on_message(told(old, {A: load}, 101.5), 101.5)
    assert peers.now(A) == Totals()
    assert peers.results["old_epoch"] == 1


def test_a_silent_replica_gives_its_load_back() -> None:
    load, peers = Load(), Peers("us")
    load.become(7, 7, 7, 100.0)
    peers.on_message(told(Teller("them", EPOCH), {A: load}, 100.0), 100.0)
    assert peers.tick(100.0 + TTL_S) == set()
    assert peers.tick(100.1 + TTL_S) == {A}
    assert peers.now(A) == Totals()
    assert len(peers) == 0


def test_peers_add_up() -> None:
    peers = Peers("us")
    for i, name in enumerate(["x", "y", "z"]):
        load = Load()
        load.become(i + 1, 10 * (i + 1), 100 * (i + 1), 100.0)
        peers.on_message(told(Teller(name, EPOCH), {A: load}, 100.0), 100.0)
    assert peers.now(A) == Totals(6, 60, 600)
    assert peers.at(A, 100.0) == (6, 60)
    assert peers.ages_s(102.0) == {"x": 2.0, "y": 2.0, "z": 2.0}


def test_replicas_are_bounded() -> None:
    peers = Peers("us")
    for i in range(REPLICAS_MAX + 3):
        peers.on_message(told(Teller(f"r{i}", EPOCH), {}, 100.0), 100.0)
    assert len(peers) == REPLICAS_MAX
    assert peers.results["too_many_replicas"] == 3


def test_workers_in_a_message_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKERS_MAX", 10)
    loads = {WorkerKey(f"w{i}", 0): Load() for i in range(13)}
    for load in loads.values():
        load.become(1, 1, 1, 100.0)
    teller = Teller("them", EPOCH)
    message = decode_inflight(told(teller, loads, 100.0))
    assert not isinstance(message, Unreadable)
    assert len(message.workers) == 10
    assert teller.untold == 3


def test_a_replica_that_tells_of_too_many_workers_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teller, peers = Teller("them", EPOCH), Peers("us")
    loads: dict[WorkerKey, Load] = {}
    monkeypatch.setattr(module, "WORKERS_MAX", 10)
    for i in range(11):
        loads[WorkerKey(f"w{i}", 0)] = load = Load()
        load.become(1, 1, 1, 100.0)
        peers.on_message(told(teller, {**loads}, 100.0 + i / 100), 100.0)
    assert peers.results["too_many_workers"] == 1
    assert len(peers) == 0


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encode(Hello(1, "r")), b"\x81\xa4kind\xa8inflight", b"\xff" * 100],
)
def test_what_cannot_be_read_is_counted(payload: bytes) -> None:
    peers = Peers("us")
    assert peers.on_message(payload, 100.0) == set()
    assert peers.results["malformed"] == 1


def test_a_message_that_is_too_large_is_counted() -> None:
    peers = Peers("us")
    assert peers.on_message(bytes((1 << 20) + 1), 100.0) == set()
    assert peers.results["too_large"] == 1


@pytest.mark.parametrize("bad", [-1, 1 << 40, 1.5, "x", None])
def test_totals_that_are_no_counts_are_refused(bad: object) -> None:
    message = {
        "kind": "inflight", "v": 1, "replica": "them", "epoch": [1, 0], "seq": 1, "full": True,
        "workers": [["a", 0, 0, [[0.0, bad, 0]]]],
    }  # fmt: skip
    peers = Peers("us")
    peers.on_message(msgspec.msgpack.encode(message), 100.0)
    assert peers.results["malformed"] == 1


def test_whatever_is_lost_the_sum_is_right_after_a_full_message() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        keys = [WorkerKey(f"w{i}", 0) for i in range(5)]
        loads = {key: Load() for key in keys}
        teller, peers = Teller("them", EPOCH), Peers("us")
        now_s = 100.0
        for _ in range(200):
            now_s += rng.choice([0.01, 0.05, 0.4])
            load = loads[rng.choice(keys)]
            load.become(rng.randrange(4), rng.randrange(9), rng.randrange(99), now_s)
            message = teller.message(loads, now_s)
            if message is not None and rng.random() < 0.6:
                peers.on_message(message, now_s)
        peers.on_message(told(teller, loads, now_s + FULL_S), now_s + FULL_S)
        for key in keys:
            assert peers.now(key) == loads[key].ours, f"seed {seed}"
