"""Policies as an operator might write them, good and bad, for tests that name them."""

from typing import Any

import numpy as np

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Scores

not_a_function = 7


def longest_overlap(rows: Candidates) -> Any:
    """Whoever holds most of the prompt.

    And nothing else.
    """
    return -rows.overlap_tokens


def in_python(rows: Candidates) -> Any:
    return [float(i) for i in range(len(rows))]


def with_terms(rows: Candidates) -> Scores:
    return Scores(rows.running + 1.0, {"running": rows.running}, {"one": 1.0})


def odd_terms(rows: Candidates) -> Scores:
    """Terms by names that C would cut or change, of columns that are not doubles in a row."""
    terms = {
        "ü": rows.table.T[:, 4],
        "a\0b": np.arange(len(rows), dtype=np.int32),
        "": -rows.waiting,
    }
    return Scores(rows.running + 1.0, terms, {"\0": -0.0, "ö": 1e300})


def drawn(rows: Candidates) -> Scores:
    return Scores(np.zeros(len(rows)), chances=np.arange(len(rows), dtype=np.float64))


def predicts(rows: Candidates) -> Scores:
    return Scores(rows.running + 1.0, ttft_s=np.arange(1, len(rows) + 1))


def predicts_nothing_to_wait_for(rows: Candidates) -> Scores:
    return Scores(rows.running, ttft_s=np.arange(len(rows), dtype=np.float64))


def predicts_for_some(rows: Candidates) -> Scores:
    return Scores(rows.running, ttft_s=np.ones(len(rows) - 1))


def raises(rows: Candidates) -> Any:
    return rows.no_such_column  # type: ignore[attr-defined]


def infinite(rows: Candidates) -> Any:
    return np.full(len(rows), np.inf)


def not_a_number_in_a_term(rows: Candidates) -> Scores:
    return Scores(rows.running, {"ratio": rows.running * np.nan})


def not_a_number_for_all(rows: Candidates) -> Scores:
    return Scores(rows.running, {}, {"mean": float("nan")})


def too_short(rows: Candidates) -> Any:
    return rows.running[:-1]


def a_matrix(rows: Candidates) -> Any:
    return np.zeros((len(rows), 2))


def text(rows: Candidates) -> Any:
    return "cheap"


def nothing(rows: Candidates) -> Any:
    return None


def chances_below_zero(rows: Candidates) -> Scores:
    return Scores(rows.running, chances=rows.running - 1)


def no_chances(rows: Candidates) -> Scores:
    return Scores(rows.running, chances=np.zeros(len(rows)))


def coolest(rows: Candidates) -> Any:
    """The coldest chip; an engine that does not say counts as 100 degrees."""
    return np.nan_to_num(rows.own_number("chip_celsius"), nan=100.0)


def unsaid(rows: Candidates) -> Any:
    return rows.own_number("chip_celsius")
