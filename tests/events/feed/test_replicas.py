"""What replicas tell one another: absolute totals, in order, for as long as they are heard."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from events.feed import replicas as module
from events.feed.replicas import (
    BYTES_MAX,
    EJECTED_MAX,
    FULL_S,
    KEPT_S,
    KEPT_STEPS_MAX,
    REPLICAS_MAX,
    SESSIONS_MAX,
    STEPS_MAX,
    TTL_S,
    WORKERS_MAX,
    Inflight,
    Moved,
    Replicas,
    Step,
    Teller,
    Totals,
    Verdict,
    decode_inflight,
)
from events.plane.facts import Epoch, Hello, Unreadable, encode
from indexer.identity import WorkerKey

A, B = WorkerKey("a", 0), WorkerKey("b", 1)
EPOCH = Epoch(1, 0)
NOTHING = Totals()


@dataclass
class Load:
    """What one replica has reserved on one worker, with all of its past."""

    ours: Totals = NOTHING
    changed: bool = True
    history: list[Step] = field(default_factory=lambda: [(0.0, 0, 0)])

    def become(self, requests: int, blocks: int, tokens: int, now_s: float) -> None:
        self.ours = Totals(requests, blocks, tokens)
        self.history.append((now_s, requests, blocks))
        self.changed = True

    def steps(self, since_s: float) -> list[Step]:
        before = sum(when_s <= since_s for when_s, _, _ in self.history)
        return self.history[max(0, before - 1) :]


def now(replicas: Replicas, worker: WorkerKey) -> Totals:
    return replicas.heard(worker, 0.0)[0]


def then(replicas: Replicas, worker: WorkerKey, time_s: float) -> tuple[int, int]:
    return replicas.heard(worker, time_s)[1]


def told(
    teller: Teller, loads: dict[WorkerKey, Load], now_s: float, *more: Any, why: str = ""
) -> bytes:
    message = teller.message(loads, now_s, *more)
    assert message is not None, why
    return message


def decoded(payload: bytes) -> Inflight:
    message = decode_inflight(payload)
    assert isinstance(message, Inflight)
    return message


def test_a_replicas_totals_arrive_as_they_are_now_and_as_they_were() -> None:
    load, replicas = Load(), Replicas("us")
    load.become(1, 10, 160, 99.2)
    load.become(3, 25, 400, 99.8)
    assert replicas.on_message(told(Teller("them", EPOCH), {A: load}, 100.0), 100.0) == {A}
    assert now(replicas, A) == Totals(3, 25, 400)
    assert then(replicas, A, 99.0) == (0, 0)
    assert then(replicas, A, 99.5) == (1, 10)
    assert then(replicas, A, 99.9) == (3, 25)
    assert then(replicas, A, 200.0) == (3, 25), "nothing has changed, as far as we know"
    assert now(replicas, B) == Totals()
    assert then(replicas, B, 99.5) == (0, 0)


def test_only_changes_are_told_between_full_messages() -> None:
    loads = {A: Load(), B: Load()}
    loads[A].become(1, 1, 1, 100.0)
    teller = Teller("them", EPOCH)
    first = decoded(told(teller, loads, 100.0))
    assert first.full
    assert teller.message(loads, 100.1) is None
    loads[B].become(2, 2, 2, 100.2)
    second = decoded(told(teller, loads, 100.2))
    assert not second.full
    assert [one.worker_id for one in second.workers] == ["b"]
    third = decoded(told(teller, loads, 100.0 + FULL_S))
    assert third.full
    assert len(third.workers) == 2


def test_nothing_of_a_forgotten_worker_is_told_by_the_next_full_message() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 1, 1, 99.9)
    replicas.on_message(told(teller, {A: load}, 100.0), 100.0)
    assert teller.message({}, 100.5) is None
    assert replicas.on_message(told(teller, {}, 101.0), 101.0) == {A}
    assert now(replicas, A) == NOTHING
    assert then(replicas, A, 100.5) == (1, 1)


def test_a_worker_that_comes_back_is_told_with_nothing() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 1, 1, 99.9)
    replicas.on_message(told(teller, {A: load}, 100.0), 100.0)
    assert replicas.on_message(told(teller, {A: Load()}, 100.1), 100.1) == {A}
    assert now(replicas, A) == NOTHING


def test_each_change_between_two_messages_arrives_with_its_time() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    replicas.on_message(told(teller, {A: load}, 100.0), 100.0)
    for i in range(100):
        at_s = 100.0 + 0.02 * i
        load.become(i, 2 * i, 0, at_s + 0.004)
        load.become(i + 1, 2 * i + 1, 0, at_s + 0.013)
        replicas.on_message(told(teller, {A: load}, at_s + 0.02), at_s + 0.02)
        assert then(replicas, A, at_s + 0.012) == (i, 2 * i)
        assert then(replicas, A, at_s + 0.014) == (i + 1, 2 * i + 1)
    assert then(replicas, A, 100.5) == (25, 49), (
        "full messages, which tell less, have not spoilt it"
    )
    assert then(replicas, A, 99.0) == (0, 0)


def test_what_ended_a_moment_ago_was_there_before_that() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 5, 80, 99.0)
    load.become(0, 0, 0, 99.7)
    replicas.on_message(
        told(teller, {A: load}, 100.0), 100.0
    )  # whoever hears us for the first time
    assert (then(replicas, A, 99.5), now(replicas, A)) == ((1, 5), NOTHING)
    replicas.on_message(told(teller, {A: load}, 101.0), 101.0)
    replicas.on_message(told(teller, {}, 102.0), 102.0)
    assert then(replicas, A, 99.5) == (1, 5)


def test_who_is_met_is_told_everything() -> None:
    loads, teller, replicas = {A: Load(), B: Load()}, Teller("them", EPOCH), Replicas("us")
    loads[A].become(1, 1, 1, 99.5)
    replicas.on_message(teller.presence(), 99.8)
    assert (replicas.met, now(replicas, A)) == (1, NOTHING)
    told(teller, loads, 99.9)  # lost
    assert teller.message(loads, 100.0) is None
    teller.begin_anew()
    assert replicas.on_message(told(teller, loads, 100.1), 100.1) == {A}
    assert (then(replicas, A, 99.4), then(replicas, A, 99.6)) == ((0, 0), (1, 1))
    assert teller.message(loads, 100.2) is None
    replicas.on_message(told(teller, loads, 101.1), 101.1)
    assert replicas.met == 1
    replicas.tick(101.2 + TTL_S)
    replicas.on_message(told(teller, loads, 105.0), 105.0)
    assert replicas.met == 2


def test_that_a_replica_is_there_changes_nothing_of_what_it_told() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 1, 1, 99.5)
    replicas.on_message(told(teller, {A: load}, 100.0), 100.0)
    assert replicas.on_message(teller.presence(), 100.0 + TTL_S) == set()
    assert replicas.tick(100.1 + TTL_S) == set(), "it was heard"
    assert now(replicas, A) == Totals(1, 1, 1)


def test_a_lost_message_is_made_good_by_the_next_full_one() -> None:
    loads = {A: Load(), B: Load()}
    loads[A].become(1, 1, 1, 100.0)
    teller, replicas = Teller("them", EPOCH), Replicas("us")
    replicas.on_message(told(teller, loads, 100.0), 100.0)
    loads[A].become(0, 0, 0, 100.1)
    loads[B].become(5, 5, 5, 100.1)
    told(teller, loads, 100.1)  # lost
    assert now(replicas, A).requests == 1
    assert replicas.on_message(told(teller, loads, 101.0), 101.0) == {A, B}
    assert (now(replicas, A).requests, now(replicas, B).requests) == (0, 5)


def test_our_own_messages_are_not_heard() -> None:
    load = Load()
    load.become(1, 1, 1, 100.0)
    replicas = Replicas("us")
    assert replicas.on_message(told(Teller("us", EPOCH), {A: load}, 100.0), 100.0) == set()
    assert len(replicas) == 0


def test_a_message_counts_once_and_in_order() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 1, 1, 100.0)
    first = told(teller, {A: load}, 100.0)
    load.become(2, 2, 2, 100.1)
    second = told(teller, {A: load}, 100.1)
    replicas.on_message(second, 100.2)
    assert replicas.on_message(first, 100.3) == set()
    assert replicas.on_message(second, 100.3) == set()
    assert now(replicas, A).requests == 2
    assert replicas.results["out_of_order"] == 2


def test_a_replica_that_started_again_begins_with_nothing_and_its_old_life_is_not_heard() -> None:
    load, replicas = Load(), Replicas("us")
    load.become(7, 7, 7, 100.0)
    old = Teller("them", EPOCH)
    replicas.on_message(told(old, {A: load}, 100.0), 100.0)
    assert replicas.on_message(told(Teller("them", Epoch(2, 0)), {}, 101.0), 101.0) == {A}
    assert now(replicas, A) == Totals()
    replicas.on_message(told(old, {A: load}, 101.5), 101.5)
    assert now(replicas, A) == Totals()
    assert replicas.results["old_epoch"] == 1


def test_a_silent_replica_gives_its_load_back() -> None:
    load, replicas = Load(), Replicas("us")
    load.become(7, 7, 7, 100.0)
    replicas.on_message(told(Teller("them", EPOCH), {A: load}, 100.0), 100.0)
    assert replicas.tick(100.0 + TTL_S) == set()
    assert replicas.tick(100.1 + TTL_S) == {A}
    assert now(replicas, A) == Totals()
    assert len(replicas) == 0


def test_replicas_add_up() -> None:
    replicas = Replicas("us")
    for i, name in enumerate(["x", "y", "z"]):
        load = Load()
        load.become(i + 1, 10 * (i + 1), 100 * (i + 1), 100.0)
        replicas.on_message(told(Teller(name, EPOCH), {A: load}, 100.0), 100.0)
    assert now(replicas, A) == Totals(6, 60, 600)
    assert then(replicas, A, 100.0) == (6, 60)
    assert replicas.ages_s(102.0) == {"x": 2.0, "y": 2.0, "z": 2.0}


def test_replicas_are_bounded() -> None:
    replicas = Replicas("us")
    for i in range(REPLICAS_MAX + 3):
        replicas.on_message(told(Teller(f"r{i}", EPOCH), {}, 100.0), 100.0)
    assert len(replicas) == REPLICAS_MAX
    assert replicas.results["too_many_replicas"] == 3


def test_workers_in_a_message_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKERS_MAX", 10)
    loads = {WorkerKey(f"w{i}", 0): Load() for i in range(13)}
    for load in loads.values():
        load.become(1, 1, 1, 100.0)
    teller = Teller("them", EPOCH)
    for at_s, count in ((100.0, 10), (100.1, 3)):  # the next one has room for the others
        message = decoded(told(teller, loads, at_s))
        assert len(message.workers) == count
        assert teller.untold == 3
    assert teller.message(loads, 100.2) is None


def busy_fleet(workers: int, name: str = "engine-{:05}") -> dict[WorkerKey, Load]:
    """Each worker with as many changes as a message may have, and counts that are large."""
    loads = {}
    for i in range(workers):
        load = loads[WorkerKey(name.format(i), i % 8)] = Load()
        for step in range(2 * STEPS_MAX):
            load.become(70_000 + i + step, 1_000_000 + step, 5_000_000, 99.0 + step / 100)
    return loads


def test_8192_busy_workers_fit_in_one_full_message_with_fewer_steps_of_each() -> None:
    loads, replicas = busy_fleet(WORKERS_MAX), Replicas("us")
    teller = Teller("them", EPOCH)
    payload = told(teller, loads, 100.0)
    assert len(payload) <= BYTES_MAX + 1024
    message = decoded(payload)
    assert message.full
    assert len(message.workers) == WORKERS_MAX
    assert not teller.is_cut
    assert teller.untold == 0
    assert replicas.on_message(payload, 100.0) == loads.keys()
    assert all(now(replicas, key) == load.ours for key, load in loads.items())


def test_workers_whose_ids_alone_are_too_long_for_one_message_are_told_in_several() -> None:
    loads = busy_fleet(WORKERS_MAX - 1, "\u20ac" * 200 + "{:05}")
    idle = loads[A] = Load()
    idle.become(1, 1, 1, 98.0)
    idle.become(0, 0, 0, 99.9)
    teller, replicas = Teller("them", EPOCH), Replicas("us")
    before = [(key.worker_id, key.dp_rank) for key in loads]
    payloads = [told(teller, loads, 100.0)]
    while teller.is_cut:
        payloads.append(told(teller, loads, 100.0 + len(payloads) / 1000))
    assert teller.untold > 0
    for payload in payloads:
        assert len(payload) <= BYTES_MAX + 1024
        message = decoded(payload)
        assert not message.full, "a full one would say that the others have nothing"
        replicas.on_message(payload, 100.1)
    first = decoded(payloads[0])
    most = max(load.ours.requests for load in loads.values())
    assert first.workers[0].steps[-1][1] == most, "the most loaded first"
    assert sorted(before) == sorted(
        (one.worker_id, one.dp_rank)
        for payload in payloads
        for one in msgspec.msgpack.decode(payload, type=Inflight).workers
    )
    assert all(now(replicas, key) == load.ours for key, load in loads.items())


def test_a_worker_takes_no_more_room_in_a_message_than_is_reckoned() -> None:
    loads = {WorkerKey("\u20ac" * 256, 99999): Load()}
    (load,) = loads.values()
    for step in range(2 * STEPS_MAX):
        load.become((1 << 31) - 1, (1 << 31) - 1 - step % 2, (1 << 31) - 1, 99.0 + step / 100)
    empty = len(Teller("them", EPOCH).presence())
    for steps_max in (1, 2, 4, 8, 16):
        wanted = [(key, one, one.steps(0.0)) for key, one in loads.items()]
        told = module._totals(*wanted[0], steps_max, 100.0)
        payload = Teller("them", EPOCH)._encoded([told], full=False)
        assert len(told.steps) <= steps_max
        assert len(payload) - empty <= module._bytes(wanted, steps_max)


def test_changes_in_a_message_are_bounded_and_the_last_one_is_of_now() -> None:
    for changes in (STEPS_MAX - 1, STEPS_MAX, STEPS_MAX + 1, 1000):
        load, replicas = Load(), Replicas("us")
        for i in range(1, changes + 1):
            load.become(i, 2 * i, 0, 100.0 + i / 1000)
        payload = told(Teller("them", EPOCH), {A: load}, 101.5)
        message = decoded(payload)
        assert STEPS_MAX // 2 < len(message.workers[0].steps) <= STEPS_MAX
        replicas.on_message(payload, 101.5)
        assert now(replicas, A) == Totals(changes, 2 * changes, 0)
        requests, _ = then(replicas, A, 100.0 + changes / 2000)
        assert abs(requests - changes / 2) <= 2 * changes / STEPS_MAX + 1


def test_what_is_kept_of_what_was_told_is_bounded() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    for i in range(5 * KEPT_STEPS_MAX):
        load.history = [(0.0, 0, 0)]
        load.become(i, i, 0, 100.0 + i / 10_000)
        replicas.on_message(told(teller, {A: load}, 100.0 + i / 10_000), 100.0 + i / 10_000)
        assert len(kept(replicas)) <= KEPT_STEPS_MAX
    assert len(kept(replicas)) >= KEPT_STEPS_MAX / 2
    for i in range(100):
        load.become(i, i, 0, 110.0 + i)
        replicas.on_message(told(teller, {A: load}, 110.0 + i), 110.0 + i)
    assert len(kept(replicas)) <= 4 * KEPT_S, "what is old goes"
    assert then(replicas, A, 209.9 - KEPT_S) == (96, 96)


def kept(replicas: Replicas) -> list[Step]:
    return replicas._replicas["them"].workers[A].steps


def test_workers_of_which_nothing_is_told_any_more_are_forgotten() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 1, 1, 100.0)
    replicas.on_message(told(teller, {A: load}, 100.0), 100.0)
    for i in range(1, 7):
        replicas.on_message(told(teller, {}, 100.0 + i), 100.0 + i)
    assert not replicas._replicas["them"].workers


def test_a_replica_that_tells_of_too_many_workers_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teller, replicas = Teller("them", EPOCH), Replicas("us")
    loads: dict[WorkerKey, Load] = {}
    monkeypatch.setattr(module, "WORKERS_MAX", 10)
    for i in range(11):
        loads[WorkerKey(f"w{i}", 0)] = load = Load()
        load.become(1, 1, 1, 100.0)
        replicas.on_message(told(teller, {**loads}, 100.0 + i / 100), 100.0)
    assert replicas.results["too_many_workers"] == 1
    assert len(replicas) == 0


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encode(Hello(1, "r")), b"\x81\xa4kind\xa8inflight", b"\xff" * 100],
)
def test_what_cannot_be_read_is_counted(payload: bytes) -> None:
    replicas = Replicas("us")
    assert replicas.on_message(payload, 100.0) == set()
    assert replicas.results["malformed"] == 1


def test_a_message_that_is_too_large_is_counted() -> None:
    replicas = Replicas("us")
    assert replicas.on_message(bytes((1 << 20) + 1), 100.0) == set()
    assert replicas.results["too_large"] == 1


@pytest.mark.parametrize("bad", [-1, 1 << 40, 1.5, "x", None])
def test_totals_that_are_no_counts_are_refused(bad: object) -> None:
    message = {
        "kind": "inflight", "v": 1, "replica": "them", "epoch": [1, 0], "seq": 1, "full": True,
        "workers": [["a", 0, 0, [[0.0, bad, 0]]]],
    }  # fmt: skip
    replicas = Replicas("us")
    replicas.on_message(msgspec.msgpack.encode(message), 100.0)
    assert replicas.results["malformed"] == 1


def test_whatever_is_lost_the_sum_is_right_after_a_full_message() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        keys = [WorkerKey(f"w{i}", 0) for i in range(5)]
        loads = {key: Load() for key in keys}
        teller, replicas = Teller("them", EPOCH), Replicas("us")
        now_s = 100.0
        for _ in range(200):
            now_s += rng.choice([0.01, 0.05, 0.4])
            load = loads[rng.choice(keys)]
            load.become(rng.randrange(4), rng.randrange(9), rng.randrange(99), now_s)
            message = teller.message(loads, now_s)
            if message is not None and rng.random() < 0.6:
                replicas.on_message(message, now_s)
        replicas.on_message(told(teller, loads, now_s + FULL_S), now_s + FULL_S)
        for key in keys:
            assert now(replicas, key) == loads[key].ours, f"seed {seed}"


class _OldTold(msgspec.Struct, frozen=True, array_like=True):
    worker_id: str
    dp_rank: int
    prefill_tokens: int
    steps: list[tuple[float, int, int]]


class _OldInflight(msgspec.Struct, frozen=True, tag="inflight", tag_field="kind"):
    """As replicas read and wrote it before they told one another of ejections."""

    v: int
    replica: str
    epoch: Epoch
    seq: int
    full: bool
    workers: list[_OldTold]


def test_ejections_are_told_as_they_change_and_with_every_message() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 10, 160, 99.9)
    teller.message({A: load}, 100.0)
    verdict = Verdict(B, 0.75, "refused")
    assert teller.message({A: load}, 100.1, []) is None
    replicas.on_message(told(teller, {A: load}, 100.2, [verdict]), 100.2)
    assert replicas.take_verdicts() == ("them", [verdict])
    assert replicas.take_verdicts() is None
    assert teller.message({A: load}, 100.3, [Verdict(B, 0.65, "refused")]) is None
    replicas.on_message(told(teller, {A: load}, 101.3, [verdict], why="a full one"), 101.3)
    assert replicas.take_verdicts() == ("them", [verdict])
    replicas.on_message(told(teller, {A: load}, 101.4, []), 101.4)
    assert replicas.take_verdicts() == ("them", [])


def test_replicas_that_know_no_ejections_read_the_rest_and_are_read() -> None:
    load, teller, replicas = Load(), Teller("them", EPOCH), Replicas("us")
    load.become(1, 10, 160, 99.9)
    new = told(teller, {A: load}, 100.0, [Verdict(B, 1.0, "refused")])
    read = msgspec.msgpack.decode(new, type=_OldInflight)
    assert [(one.worker_id, one.steps[-1][1:]) for one in read.workers] == [("a", (1, 10))]
    old = msgspec.msgpack.encode(read)
    assert b"ejected" not in old
    replicas.on_message(old, 100.0)
    assert replicas.take_verdicts() == ("them", [])
    assert now(replicas, A).requests == 1


def test_ejections_in_one_message_are_bounded() -> None:
    verdicts = [Verdict(WorkerKey(f"w{i}", 0), 1.0, "refused") for i in range(2 * EJECTED_MAX)]
    message = told(Teller("them", EPOCH), {}, 100.0, verdicts)
    read = decoded(message)
    assert len(read.ejected) == EJECTED_MAX


def test_sessions_are_told_once_and_heard_by_who_knows_of_them() -> None:
    teller, replicas = Teller("them", EPOCH), Replicas("us")
    assert teller.message({}, 100.0) is not None, "a full one"
    moved = [Moved(1, A), Moved((1 << 64) - 1, B), Moved(3, A)]
    message = told(teller, {}, 100.1, (), moved, why="they are news by themselves")
    replicas.on_message(message, 100.1)
    assert replicas.take_moved() == moved
    assert replicas.take_moved() == []
    replicas.on_message(message, 100.2)
    assert replicas.take_moved() == [], "a message counts once"
    read = msgspec.msgpack.decode(message, type=_OldInflight)
    assert read.workers == []
    replicas.on_message(msgspec.msgpack.encode(read), 100.3)
    assert replicas.take_moved() == []


def test_a_session_takes_twelve_bytes_of_a_message() -> None:
    moved = [Moved((1 << 63) + i, (A, B)[i % 2]) for i in range(SESSIONS_MAX)]
    message = told(Teller("them", EPOCH), {}, 100.0, (), moved)
    assert len(message) < 12 * SESSIONS_MAX + 200
    read = decoded(message)
    assert len(read.sessions) == SESSIONS_MAX


@pytest.mark.parametrize("bad", [[[1, 1]], [[-1, 0]], [[1, -1]], [[0, 0]] * (SESSIONS_MAX + 1)])
def test_sessions_of_no_worker_are_refused(bad: object) -> None:
    message = told(Teller("them", EPOCH), {}, 100.0, (), [Moved(1, A)])
    fields = msgspec.msgpack.decode(message)
    assert isinstance(decode_inflight(msgspec.msgpack.encode(fields)), Inflight)
    fields["sessions"] = bad
    read = decode_inflight(msgspec.msgpack.encode(fields))
    assert isinstance(read, Unreadable)
    assert read.reason == "malformed"
