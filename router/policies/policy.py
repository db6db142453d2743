"""What a policy is: a name, a formula to read, and the function that computes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.candidates import Candidates, Column


@dataclass(frozen=True, slots=True)
class Scores:
    """What a policy made of the candidates."""

    costs: Column
    """One a row, finite; the lowest that is not excluded is picked, ties at random."""
    row_terms: Mapping[str, Column] = field(default_factory=dict)
    """What the cost of a row is made of, for receipts."""
    shared_terms: Mapping[str, float] = field(default_factory=dict)
    """What is the same for all rows, such as the mean load."""


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """An entry of the table of policies."""

    name: str
    summary: str
    formula: str
    parameters: Mapping[str, float]
    score: Callable[[Candidates], Scores]
    """Pure: no clock, no randomness. Gets at least one row."""
