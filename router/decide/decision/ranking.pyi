"""The rows of one decision ranked in C: their costs, their order, and the guard."""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Policy, Scores
from router.fleet.reservations.load import WorkerLoad
from router.fleet.table import Column, Flags

WANTED_MAX: Final[int]
KERNELS: Final[tuple[Callable[[Candidates, Any], Scores], ...]]

def kernel_of(policy: Policy) -> Kernel | None: ...

class Kernel:
    """A policy's costs in C, with the policy's parameters."""

    reads_users: bool
    reads_recent: bool
    reads_prefill: bool

    def __init__(self, kind: int, numbers: Iterable[float]) -> None: ...

class RowUsers:
    """Which blocks our open requests use on each worker of a pool."""

    def __init__(self, workers: tuple[WorkerKey, ...]) -> None: ...
    def refresh(self, loads: Mapping[WorkerKey, WorkerLoad], changes: int) -> int:
        """Reads the workers' loads again if some came or went."""

def prefill_inputs(
    table: npt.NDArray[np.float64],
    others_waiting: Column,
    slots: npt.NDArray[np.intp],
) -> npt.NDArray[np.float64]:
    """Shape (5, rows): rate, ends_s, least_s, tokens, others_waiting."""

class Ranking:
    """Rows, their costs and their order."""

    costs: Column
    seconds: Column | None
    """Predicted seconds to each row's first token; None: the policy predicts none."""
    moved_from: int
    """Row of the pick that the guard moved; -1: the pick stayed."""

    def __init__(
        self,
        table: npt.NDArray[np.float64],
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        prefixes: HashArray | None,
        barred: Flags | None,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def table(self) -> npt.NDArray[np.float64]:
        """The columns as they are at the first call, copied: nobody writes to them later."""
    @property
    def tied(self) -> int: ...
    @property
    def full(self) -> int: ...
    @property
    def not_finite(self) -> int: ...
    @property
    def shortest_s(self) -> float:
        """The least of `seconds` over rows that could be picked when they were put in order."""
    def score(
        self,
        kernel: Kernel,
        users: RowUsers | None,
        recent: Column | None,
        inputs: npt.NDArray[np.float64] | None,
        mean_work: float,
        now_s: float,
        output_tokens: int,
        distance: Column | None,
    ) -> int: ...
    def take(self, costs: Column, seconds: Column | None) -> int: ...
    def invest(self, tokens: Column | None) -> None:
        """Sets each row's invested tokens, for costs and the guard; None: none. Called before the
        rows are scored."""

    def lessen(self, row: int, bonus: float) -> None: ...
    def in_order(self, wanted: int, in_turn: bool, rng: random.Random) -> list[int]: ...
    def moved(
        self,
        request_tokens: float,
        margin: float,
        order: list[int],
        in_turn: bool,
        rng: random.Random,
    ) -> list[int]: ...
    def tpot_s(self, row: int) -> float | None: ...
    def best_overlap(self) -> int: ...
    def bad_rows(self) -> list[int]: ...
