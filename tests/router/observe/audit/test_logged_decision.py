"""Logged decisions: what a line says is what the policy saw, and nothing of what was asked."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.identity import Tier
from router.decide.decision.decision import Decision
from router.decide.policies import POLICIES
from router.decide.policies.policy import Scores
from router.observe.audit.logged_decision import (
    LoggedDecision,
    NoHashes,
    candidates,
    capture,
    decode,
    encode,
    reasons,
)
from tests.stage.fleet import Fleet, prompt

RATES = ("rate", "wait_s", "tokens", "count")


def play(seed: int, see: Any, policy: str = "ttft") -> None:
    """Decisions of a fleet in which workers differ in all that policies look at."""
    rng = random.Random(seed)
    fleet = Fleet(seed=seed, policy=policy, prefill_rate=1000.0)
    for i in range(6):
        labels = {"host": f"h{i}", "rack": f"r{i % 2}", "cluster": "c"} if i else {}
        key = fleet.add(
            f"w{i}", i % 2, running=rng.randrange(8), waiting=rng.randrange(4), labels=labels,
            used_blocks=float(rng.randrange(900)), total_slots=rng.choice([12, 100, None]),
            total_blocks=rng.choice([None, 1000]), block_size=rng.choice([16, 32]),
        )  # fmt: skip
        fleet.cache(key, prompt(512), rng.randrange(0, 513), rng.choice(list(Tier)))
    for i in range(20):
        asked = fleet.request(
            prompt(rng.choice([8, 64, 512, 700])), session_id=f"secret-{i % 5}", tenant="secret",
            excluded_workers=frozenset(rng.sample(["w1", "w2"], rng.randrange(3))),
        )  # fmt: skip
        fleet.core.route(asked, fleet.now_s, watch=see)


def equal(one: Scores, other: Scores) -> bool:
    terms = zip(one.row_terms.values(), other.row_terms.values(), strict=True)
    return (
        np.array_equal(one.costs, other.costs, equal_nan=True)
        and all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in terms)
        and one.shared_terms == other.shared_terms
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_lines_candidates_get_the_same_costs_from_every_policy(seed: int) -> None:
    seen = 0

    def see(decision: Decision) -> None:
        nonlocal seen
        seen += 1
        line = decode(encode(capture(decision, "here", hashes=True)))
        rows = candidates(line)
        assert reasons(line) == list(decision.excluded)
        assert rows.workers == decision.rows.workers
        for policy in POLICIES.values():
            assert equal(policy.score(rows), policy.score(decision.rows)), policy.name
        assert np.array_equal(rows.of_session, decision.rows.of_session)
        assert line.picked == decision.order[0]
        assert line.costs == decision.scores.costs.tolist()

    play(seed, see)
    assert seen == 20


def lines(hashes: bool) -> list[LoggedDecision]:
    told: list[LoggedDecision] = []
    play(3, lambda decision: told.append(capture(decision, "here", hashes)))
    return told


def test_a_line_has_no_hashes_unless_asked_and_never_what_was_asked() -> None:
    for hashes in (False, True):
        for line in lines(hashes):
            text = encode(line).decode()
            assert "secret" not in text
            assert ("affinity_key" in text) == ("prefixes" in text) == hashes
            assert text.endswith("}\n")
            assert "\n" not in text[:-1]


def test_a_policy_that_needs_hashes_says_so() -> None:
    with pytest.raises(NoHashes, match=r"decision_log\.hashes"):
        POLICIES["session-sticky"].score(candidates(lines(hashes=False)[0]))


def test_hashes_are_those_of_the_prompt() -> None:
    line = next(one for one in lines(hashes=True) if one.prompt_tokens == 512)
    assert line.prefixes is not None
    told = [int(line.prefixes[i : i + 16], 16) for i in range(0, len(line.prefixes), 16)]
    assert told == prompt(512).prefixes(512 // len(told)).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": 2},
        {"picked": 6},
        {"picked": -1},
        {"prompt_tokens": 0},
        {"costs": [1.0]},
        {"columns": {"running": [1.0, 2.0]}},
        {"overlap_tokens": {"raw": []}},
        {"overlap_tokens": {"raw": [1 << 31] * 6}},
        {"excluded": [[9, "full"]]},
        {"of_session": [6]},
        {"cheapest": 6},
        {"cheapest": -1},
        {"blocks_in_use": [1.0]},
        {"workers": []},
        {"at_s": "now"},
        {"prefill": {"mean_work": 1.0} | dict.fromkeys(RATES, [0.0] * 6)},
    ],
)
def test_a_line_that_does_not_hold_together_is_refused(wrong: dict[str, Any]) -> None:
    told = msgspec.json.decode(encode(lines(hashes=False)[0]))
    decode(msgspec.json.encode(told))
    with pytest.raises(ValueError, match=r"."):
        decode(msgspec.json.encode(told | wrong))


@given(st.binary(max_size=60), st.integers(0, 4000))
def test_torn_lines_are_refused(junk: bytes, at: int) -> None:
    for content in (junk, WHOLE[: min(at, len(WHOLE) - 2)]):
        with pytest.raises(ValueError, match=r"."):
            decode(content)


WHOLE = encode(lines(hashes=True)[0])
