"""Shared prefixes: where prompts branch, and what one computes for others."""

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import HashArray, pack_tokens
from router.decide.core.progress import Pick
from router.fleet import shared_prefixes
from router.fleet.shared_prefixes import EXPECTED, FORKS, HALF_S, SharedPrefixes
from router.request.prompt import Prompt
from tests.stage.fleet import Fleet

BLOCK = 16
RATE = 64.0
"""Tokens a second."""
ROOMY = 1000.0


def hashes(*numbers: int) -> HashArray:
    return np.array(numbers, np.uint64)


def invested(
    known: SharedPrefixes,
    prefixes: HashArray,
    matched: list[int],
    room: list[float],
    now_s: float = 0.0,
) -> list[float] | None:
    """matched: blocks that each worker has."""
    usable, longest = BLOCK * np.array(matched, np.int32), BLOCK * max(matched)
    found = known.invested(prefixes, usable, longest, BLOCK, lambda: np.array(room), RATE, now_s)
    return None if found is None else found.tolist()


def test_prompts_branch_where_their_longest_match_ends() -> None:
    known = SharedPrefixes()
    for own in range(3, 6):
        known.on_pick(hashes(1, 2, own), 2, 0.0)
    known.on_pick(hashes(1, 2, 3, 7), 3, 0.0)
    assert known.earlier(hashes(1, 2, 9), 2, 0.0) == 3
    assert known.earlier(hashes(1, 2, 3, 8), 3, 0.0) == 1
    assert known.earlier(hashes(1, 2, 9), 1, 0.0) == 0
    assert known.earlier(hashes(5, 6), 0, 0.0) == 0


def test_an_earlier_prompt_counts_half_after_a_time() -> None:
    known = SharedPrefixes()
    for _ in range(4):
        known.on_pick(hashes(1, 2), 1, 0.0)
    assert known.earlier(hashes(1, 3), 1, HALF_S) == pytest.approx(2)
    known.on_pick(hashes(1, 2), 1, HALF_S)
    assert known.earlier(hashes(1, 3), 1, 2 * HALF_S) == pytest.approx(1.5)
    assert known.earlier(hashes(1, 3), 1, 0.0) == pytest.approx(3)  # a clock that goes back


def test_what_later_prompts_pay_grows_with_their_number() -> None:
    known, prefixes = SharedPrefixes(), hashes(1, 2, 3)
    for _ in range(int(FORKS) + 1):  # as of a session that goes on, and forks
        assert invested(known, prefixes, [2, 0], [ROOMY] * 2) is None
        known.on_pick(prefixes, 2, 0.0)
    later = EXPECTED / 2
    part = later / (1 + later)
    assert invested(known, prefixes, [2, 0], [ROOMY] * 2) == [0, part * 2 * BLOCK]
    assert invested(known, prefixes, [2, 1], [ROOMY] * 2) == [0, part * BLOCK]
    assert invested(known, prefixes, [2, 2], [ROOMY] * 2) is None
    assert invested(known, hashes(8, 9), [0, 0], [ROOMY] * 2) is None
    known.on_pick(prefixes, 2, 0.0)
    part = 2 * later / (1 + 2 * later)
    assert invested(known, prefixes, [2, 0], [ROOMY] * 2) == [0, part * 2 * BLOCK]


def test_nothing_is_invested_without_room_for_the_whole_prompt() -> None:
    known, prefixes = SharedPrefixes(), hashes(1, 2, 3)
    for _ in range(4 + int(FORKS)):
        known.on_pick(prefixes, 2, 0.0)
    most = EXPECTED / (1 + EXPECTED) * 2 * BLOCK
    assert invested(known, prefixes, [2, 0, 0, 0], [0, 3, 2.9, nan]) == [0, most, 0, 0]


def test_in_a_burst_one_worker_after_the_other_gets_the_prefix() -> None:
    known, prefixes = SharedPrefixes(), hashes(1, 2, 3)
    for invests in (False, False, True, False):
        known.on_pick(prefixes, 2, 0.0, invests)
    computed_s = 2 * BLOCK / RATE
    assert invested(known, prefixes, [2, 0], [ROOMY] * 2, computed_s - 0.01) is None
    assert invested(known, prefixes, [2, 0], [ROOMY] * 2, computed_s) is not None


def test_at_the_bound_the_prefix_used_longest_ago_is_forgotten_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefixes, "PREFIXES_MAX", 2)
    known = SharedPrefixes()
    for number in (1, 2, 1, 3):
        known.on_pick(hashes(number, 9), 1, 0.0)
    assert (len(known), known.forgotten) == (2, 1)
    assert [known.earlier(hashes(number), 1, 0.0) for number in (1, 2, 3)] == [2, 0, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 40))
def test_never_more_is_invested_than_a_worker_lacks(matched: list[int], uses: int) -> None:
    known, prefixes = SharedPrefixes(), hashes(1, 2, 3, 4)
    for _ in range(uses):
        known.on_pick(prefixes, max(matched), 0.0)
    found = invested(known, prefixes, matched, [ROOMY] * len(matched))
    for tokens, blocks in zip(found or (), matched, strict=False):
        assert 0 <= tokens <= (max(matched) - blocks) * BLOCK


class TestTheDefault:
    """It brings a system prompt to a worker that lacks it."""

    def picks(self, fleet: Fleet, count: int) -> list[Pick]:
        """Of prompts of 3,220 tokens that begin with the same 3,200; each is computed before the
        next one comes."""
        picks = []
        for number in range(count):
            own = range(5000 + 20 * number, 5000 + 20 * number + 20)
            pick = fleet.route(Prompt.from_tokens(pack_tokens([*range(3200), *own])))
            picks.append(pick)
            fleet.report(pick.reservation, "prefill_done")
        return picks

    def fleet(self, total_blocks: int | None = 10_000) -> Fleet:
        fleet = Fleet(policy="dynamo-adaptive")
        for name in ("a", "b"):
            fleet.add(name, total_blocks=total_blocks, total_slots=100)
        return fleet

    def test_sooner_the_more_prompts_share_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def to_both() -> int:
            """Prompts until both workers got one."""
            workers = [pick.reservation.worker for pick in self.picks(self.fleet(), 60)]
            return workers.index(next(one for one in workers if one != workers[0]))

        soon = to_both()
        monkeypatch.setattr(SharedPrefixes, "on_pick", lambda *_: None)
        assert soon < to_both()

    def test_and_says_what_counts_for_later_prompts(self) -> None:
        picks = self.picks(self.fleet(), 9)
        invested_tokens = [pick.decision.rows.invested_tokens.max() for pick in picks]
        assert invested_tokens[: int(FORKS) + 2] == [0] * (int(FORKS) + 2)
        assert max(invested_tokens) > 0
        for pick in picks:
            assert (
                pick.decision.scores.row_terms["invested_share"].tolist()
                == (pick.decision.rows.invested_tokens / 3220).tolist()
            )

    def test_of_an_unknown_size_nothing(self) -> None:
        for pick in self.picks(self.fleet(total_blocks=None), 9):
            assert not pick.decision.rows.invested_tokens.any()
