"""Blocks that were stored just now."""

import numpy as np
import pytest

from events.feed import newest
from events.feed.newest import NEWEST_S, Newest
from indexer.identity import HashArray


def hashes(*numbers: int) -> HashArray:
    return np.array(numbers, "<u8")


def test_the_first_prefix_that_a_worker_stored_just_now_is_found() -> None:
    kept = Newest()
    kept.add(3, hashes(5, 4), 10.0)
    kept.add(3, hashes(9), 10.1)
    kept.add(4, hashes(1), 10.2)
    assert kept.first(3, hashes(1, 2, 4, 5), 10.3) == 2
    assert kept.first(4, hashes(1, 2, 4, 5), 10.3) == 0
    assert kept.first(3, hashes(1, 2, 3), 10.3) is None
    assert kept.first(5, hashes(1), 10.3) is None


def test_what_is_a_second_old_is_forgotten() -> None:
    kept = Newest()
    kept.add(3, hashes(5), 10.0)
    kept.add(3, hashes(6), 10.5)
    assert kept.first(3, hashes(5, 6), 10.0 + NEWEST_S) == 1
    assert kept.hashes == 1
    assert kept.first(3, hashes(5, 6), 10.5 + NEWEST_S) is None
    assert (kept.hashes, len(kept), kept._stored) == (0, 0, {})


def test_the_oldest_go_past_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "HASHES_MAX", 3)
    kept = Newest()
    for number in range(3):
        kept.add(number, hashes(1, 2), 0.0)
        assert kept.hashes <= 3
    assert [kept.first(slot, hashes(1), 0.0) for slot in range(3)] == [None, None, 0]
    kept.add(7, hashes(*range(9)), 0.0)  # more than may be kept
    assert (kept.hashes, len(kept)) == (3, 1)
    assert kept.first(7, hashes(*range(9)), 0.0) == 6


def test_a_block_that_two_facts_have_stays_until_both_are_old() -> None:
    kept = Newest()
    kept.add(3, hashes(5, 6), 10.0)
    kept.add(3, hashes(5), 10.5)
    assert kept.first(3, hashes(6, 5), 10.2 + NEWEST_S) == 1


def test_a_fact_without_hashes_is_not_kept() -> None:
    kept = Newest()
    kept.add(3, hashes(5), 10.0)
    kept.add(3, hashes(), 10.0)
    assert len(kept) == 1
    assert kept.first(3, hashes(5), 10.0 + NEWEST_S) is None
    kept.add(4, hashes(), 12.0)
    assert (kept.hashes, len(kept), kept._stored) == (0, 0, {})
