"""A policy of the operator's own: a function named in the configuration.

    def score(rows: Candidates) -> costs, one a row, lower is better; or Scores

The function reads the columns of router/decide/policies/candidates.py, and is called once a
decision, on the event loop: it must not wait for anything. Its exceptions and unusable scores end
in PolicyFailed; the decider then uses `dynamo-adaptive`, and counts the failure.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
from typing_extensions import override

from router.config.own_functions import own_function
from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores

Function = Callable[[Candidates], Any]


class Failure(StrEnum):
    """How a policy failed; its values are values of a metric's label."""

    RAISED = "raised"
    SHAPE = "shape"
    NOT_A_NUMBER = "not_a_number"


class PolicyFailed(Exception):
    """A policy of the operator's own raised, or returned unusable scores."""

    def __init__(self, failure: Failure, sentence: str) -> None:
        super().__init__(failure, sentence)
        self.failure = failure
        self.sentence = sentence

    @override
    def __str__(self) -> str:
        return self.sentence


def own_policy(name: str, where: str) -> Policy:
    """Makes a policy of the operator's function named module:function; raises ConfigError.

    where: the configuration's key that names it.
    """
    function = own_function("policy", name, where)
    summary = (function.__doc__ or "a function of the operator's").strip().splitlines()[0]
    return Policy(
        name=name,
        summary=summary,
        formula="cost",
        settings=Parameters(),
        function=lambda rows, _: checked(function, rows),
        timed=True,
    )


def checked(function: Function, rows: Candidates) -> Scores:
    """A function's scores of candidates; raises PolicyFailed for unusable ones."""
    try:
        made = function(rows)
        scores = made if isinstance(made, Scores) else Scores(np.asarray(made, np.float64))
        if scores.ttft_s is not None:
            scores = replace(scores, ttft_s=np.ascontiguousarray(scores.ttft_s, np.float64))
        _check(scores, rows)
    except PolicyFailed:
        raise
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        raise PolicyFailed(Failure.RAISED, sentence) from error
    return replace(scores, row_terms={**scores.row_terms, "cost": scores.costs})


def _check(scores: Scores, rows: Candidates) -> None:
    columns = {"costs": scores.costs, **scores.row_terms}
    if scores.chances is not None:
        columns["chances"] = scores.chances
    if scores.ttft_s is not None:
        columns["ttft_s"] = scores.ttft_s
    for name, column in columns.items():
        if column.shape != (len(rows),):
            raise PolicyFailed(
                Failure.SHAPE,
                f"{name} have shape {column.shape} for {len(rows)} rows; expected a number a row",
            )
        if not np.isfinite(column).all():
            raise PolicyFailed(Failure.NOT_A_NUMBER, f"{name} are not all finite numbers")
    if not np.isfinite(list(scores.shared_terms.values())).all():
        raise PolicyFailed(Failure.NOT_A_NUMBER, "shared terms are not all finite numbers")
    if scores.ttft_s is not None and (scores.ttft_s <= 0).any():
        raise PolicyFailed(Failure.NOT_A_NUMBER, "ttft_s are not all above 0")
    if scores.chances is not None:
        can = rows.can_take
        if (scores.chances < 0).any() or (can.any() and not scores.chances[can].any()):
            raise PolicyFailed(
                Failure.NOT_A_NUMBER, "chances are below 0, or 0 for all rows that can be picked"
            )
