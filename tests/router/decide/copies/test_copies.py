"""The bounds on copies, and the count of what came of them."""

import numpy as np

from indexer.identity import WorkerKey
from router.decide.copies.copies import (
    AGAIN_S,
    BURST,
    UNDER_WAY_MAX,
    USE_S,
    WAITING_MAX,
    Copies,
    Copy,
    CopyFate,
    Prefix,
)
from router.request.request import Role


def prefix(number: int = 1, blocks: int = 4) -> Prefix:
    chain = np.arange(number, number + blocks, dtype=np.uint64)
    return Prefix(("m", int(chain[-1])), "m", Role.BOTH, 16, chain, None, "", "")


def begin(copies: Copies, number: int, now_s: float, of: Prefix | None = None) -> Copy:
    worker = WorkerKey(f"w{number}", 0)
    return copies.begin(of or prefix(), worker, WorkerKey("holder", 0), 2.0, 1.0, now_s)


def done(copies: Copies, number: int, now_s: float, of: Prefix | None = None) -> Copy:
    copy = begin(copies, number, now_s, of)
    assert copies.ended(copy, True, now_s)
    return copy


def test_no_more_begin_in_a_minute_than_allowed() -> None:
    copies = Copies(60.0)
    begun = 0
    for tick in range(240):
        now_s = tick / 4
        while copies.may_begin(now_s):
            done(copies, begun, now_s)
            begun += 1
    assert begun == BURST + 59  # the second 59.75 is the last


def test_there_are_so_many_under_way_at_most() -> None:
    copies = Copies(600.0)
    times = [float(tick) for tick in range(100)]
    under_way = [
        begin(copies, i, now_s) for i, now_s in enumerate(times) if copies.may_begin(now_s)
    ]
    assert len(under_way) == UNDER_WAY_MAX
    copies.ended(under_way[0], False, 100.0)
    assert copies.may_begin(100.0)


def test_a_worker_takes_one_copy_at_a_time_and_the_same_one_once_in_a_while() -> None:
    copies = Copies(60.0)
    worker, one, other = WorkerKey("w0", 0), prefix(1), prefix(2)
    assert copies.may_begin(0.0)
    copy = begin(copies, 0, 0.0, one)
    assert not copies.may_take(worker, other)
    assert copies.may_take(WorkerKey("w1", 0), one)
    copies.ended(copy, False, 1.0)
    assert copies.may_take(worker, other)
    assert not copies.may_take(worker, one)
    assert copies.may_begin(AGAIN_S)
    assert copies.may_take(worker, one)


def test_a_copy_is_used_by_the_first_request_that_finds_all_of_it() -> None:
    copies = Copies(60.0)
    copy = done(copies, 0, 0.0)
    chain = np.append(copy.prefix.chain, np.uint64(99))
    copies.on_pick(copy.target, chain, 48)  # a part of it
    copies.on_pick(WorkerKey("w1", 0), chain, 80)  # elsewhere
    copies.on_pick(copy.target, chain[1:], 80)  # another prompt
    copies.on_pick(copy.target, chain[:2], 32)  # a shorter one
    assert copies.waiting(0.0, 1.0) == [copy]
    copies.on_pick(copy.target, chain, 64)
    copies.on_pick(copy.target, chain, 64)
    assert copies.fates == {CopyFate.BEGUN: 1, CopyFate.DONE: 1, CopyFate.USED: 1}


def test_a_copy_that_nobody_uses_is_useless_at_last() -> None:
    copies = Copies(60.0)
    done(copies, 0, 0.0)
    young = done(copies, 1, 10.0)
    assert copies.waiting(0.0, USE_S) == [young]
    copies.useless(young)
    assert copies.waiting(0.0, USE_S) == []
    assert copies.fates[CopyFate.USELESS] == 2


def test_the_oldest_of_too_many_unused_ones_is_useless() -> None:
    copies = Copies(600.0)
    for number in range(WAITING_MAX + 3):
        done(copies, number, 0.0)
    assert len(copies.waiting(0.0, 0.0)) == WAITING_MAX
    assert copies.fates[CopyFate.USELESS] == 3


def test_the_outcome_of_a_copy_that_was_cancelled_counts_no_more() -> None:
    copies = Copies(60.0)
    copy = begin(copies, 0, 0.0)
    assert copies.cancel(copy).copy is copy
    assert not copies.ended(copy, True, 1.0)
    assert copies.fates == {CopyFate.BEGUN: 1, CopyFate.CANCELLED: 1}
