"""A policy: a name, a formula to read, and the function that computes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from router.decide.policies.candidates import Candidates
from router.fleet.table import Column


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a policy, each with its range and meaning; operators may change them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The costs that a policy gives its candidates, and their terms."""

    costs: Column
    """A cost a row, finite; the lowest that is not excluded is picked. Of equal ones a random row
    is, or, for requests that name a session, the worker picked longest ago."""
    row_terms: Mapping[str, Column] = field(default_factory=dict)
    """Terms of each row's cost, for receipts."""
    shared_terms: Mapping[str, float] = field(default_factory=dict)
    """Terms that all rows share, such as the mean load."""
    chances: Column | None = None
    """A chance a row, at least 0, and above 0 for some row that can be picked: the pick is drawn
    by the chances, not by the costs. None: the lowest cost is picked."""
    ttft_s: Column | None = None
    """Predicted seconds to the first token, above 0, a row; None: the policy predicts none."""


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A policy: an entry of POLICIES, or a function of the operator's own."""

    name: str
    summary: str
    formula: str
    settings: Parameters
    function: Callable[[Candidates, Any], Scores]
    """Pure: no clock, no randomness. Gets at least one row, and the settings."""
    timed: bool = False
    """Whether the policy reads how long prompts under way will take (router/fleet/rates.py), or
    workers' working sets (working_set.py): its picks are noted in both."""
    invests: bool = False
    """Whether the policy reads invested tokens (shared_prefixes.py); such a policy is timed."""
    draws: bool = False
    """Whether its picks are drawn by chances, so that costs decide nothing."""
    affinity_bonus: float = 0.0
    """Reduction of the cost of the worker of the request's session, in the policy's unit
    (router/decide/policies/affinity.py)."""

    def described(self) -> dict[str, str]:
        """Meaning and range of each parameter, by its name."""
        hints = get_type_hints(type(self.settings), include_extras=True)
        return {name: _described(hints[name]) for name in self.parameters}

    @property
    def parameters(self) -> Mapping[str, float]:
        """Values of the formula's constants, by name."""
        return msgspec.structs.asdict(self.settings)

    def score(self, rows: Candidates) -> Scores:
        """Returns the costs of candidates, at least one."""
        scores = self.function(rows, self.settings)
        if not self.affinity_bonus:
            return scores
        affinity = np.where(rows.of_session, self.affinity_bonus, 0.0)
        terms = {**scores.row_terms, "affinity": affinity}
        return replace(scores, costs=scores.costs - affinity, row_terms=terms)


def _described(hint: Any) -> str:
    about = next(part for part in get_args(hint) if isinstance(part, msgspec.Meta))
    bounds = (
        ("at least", about.ge),
        ("more than", about.gt),
        ("at most", about.le),
        ("less than", about.lt),
    )
    limits = ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    return f"{about.description}; {limits}"
