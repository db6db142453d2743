"""Results of comparing the router's own tokens with engines': which are proven to be equal. Pure.

A state is kept for each model, target (an engine with its version), and shape of bodies.

Laws:
- a shape is proven by canaries, or by PROVEN_AFTER bodies in a row whose tokens were equal, and by
  nothing else;
- one difference bars a shape; it is compared again only after all canaries passed on a worker of
  its target (they run again after a reload, and on each new worker);
- OTHER, which stands for all shapes over SHAPES_MAX of a model, is never proven;
- a worker is odd if its canaries differ while those of another worker of its target are equal; its
  tokens prove nothing and bar nothing;
- a model has at most TARGETS_MAX targets; past that, the one that came first is forgotten.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

SHAPES_MAX = 256
"""Shapes of a model that are kept by name; further ones are OTHER."""
OTHER = "other"
"""The shape of all bodies whose own shape is over the bound."""
PROVEN_AFTER = 3
TARGETS_MAX = 8
"""Engines of a model, with their versions."""
WORKERS_MAX = 4096
"""Workers of a model whose canaries are remembered."""


class State(StrEnum):
    """State of a shape; its values are values of a metric's label."""

    UNPROVEN = "unproven"
    PROVEN = "proven"
    BARRED = "barred"


class Target(NamedTuple):
    """An engine and its version, which together decide on a body's tokens."""

    engine: str
    version: str


class Difference(NamedTuple):
    """Where the tokens of one body first differ."""

    at: int | None
    """Index of the token; None: only the counts are known."""
    own: int
    """The router's token id there, or its count; 0: its tokens end before."""
    engine: int
    """The engine's token id there, or its count; 0: its tokens end before."""


@dataclass(slots=True)
class Trust:
    """State of one shape, and the comparisons that led to it."""

    state: State = State.UNPROVEN
    compared: int = 0
    """Bodies in a row whose tokens were equal."""
    difference: Difference | None = None
    """The difference that barred the shape."""
    worker: str = ""
    """The worker whose tokens barred the shape."""

    def bar(self, difference: Difference, worker: str) -> None:
        """Bars the shape, so that the router's own tokens of such bodies are not used."""
        self.state, self.compared = State.BARRED, 0
        self.difference, self.worker = difference, worker


class Barred(NamedTuple):
    """A shape whose tokens differed, so that the router's own are not used."""

    target: Target
    shape: str
    difference: Difference


@dataclass(slots=True)
class _Model:
    shapes: set[str] = field(default_factory=set)
    targets: "OrderedDict[Target, dict[str, Trust]]" = field(default_factory=OrderedDict)
    workers: "OrderedDict[str, list[Barred]]" = field(default_factory=OrderedDict)
    """Workers whose canaries ran -> shapes of which canaries differed."""
    equal: dict[tuple[Target, str], set[str]] = field(default_factory=dict)
    """Target and shape -> workers whose canaries of that shape were equal."""

    def forget(self, worker: str) -> None:
        """Forgets the results of a worker's canaries."""
        self.workers.pop(worker, None)
        for key in [key for key, workers in self.equal.items() if worker in workers]:
            self.equal[key].discard(worker)
            if not self.equal[key]:
                del self.equal[key]


class Proof:
    """Results of all comparisons of tokens, by model, target and shape."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def __iter__(self) -> Iterator[tuple[str, Target, str, Trust]]:
        for name, model in self._models.items():
            for target, shapes in model.targets.items():
                for shape, trust in shapes.items():
                    yield name, target, shape, trust

    def shape(self, model: str, shape: str) -> str:
        """The name under which a shape is kept: its own, or OTHER."""
        known = self._models.setdefault(model, _Model()).shapes
        if shape not in known:
            if len(known) >= SHAPES_MAX:
                return OTHER
            known.add(shape)
        return shape

    def state(self, model: str, target: Target, shape: str) -> State:
        known = self._models.get(model)
        trust = known.targets.get(target, {}).get(shape) if known is not None else None
        return State.UNPROVEN if trust is None else trust.state

    def compare(
        self, model: str, target: Target, shape: str, own: bytes, engine: bytes, worker: str = ""
    ) -> Difference | None:
        """Compares the router's tokens of a body with the engine's on `worker`. Returns the
        difference, which bars the shape unless the worker is odd; None: they are equal.
        """
        difference = first_difference(own, engine)
        if self.odd(model, target, worker):
            return difference
        trust = self._trust(model, target, shape)
        if difference is not None:
            trust.bar(difference, worker)
        elif trust.state is State.UNPROVEN:
            trust.compared += 1
            if trust.compared >= PROVEN_AFTER and shape != OTHER:
                trust.state = State.PROVEN
        elif trust.state is State.PROVEN:
            trust.compared += 1
        return difference

    def count(
        self, model: str, target: Target, shape: str, own: int, engine: int, worker: str = ""
    ) -> Difference | None:
        """Compares the number of tokens with an answer's own count on `worker`. Returns the
        difference, which bars the shape unless the worker is odd; None: the numbers are equal.

        Equal numbers prove nothing: other tokens may be as many.
        """
        if own == engine:
            return None
        difference = Difference(None, own, engine)
        if not self.odd(model, target, worker):
            self._trust(model, target, shape).bar(difference, worker)
        return difference

    def canaries(
        self,
        model: str,
        target: Target,
        outcomes: dict[str, list[tuple[bytes, bytes]]],
        worker: str = "",
    ) -> list[Barred]:
        """Compares the router's tokens of canaries with the engine's on `worker`; returns the
        differences. outcomes: shape -> pairs (own tokens, engine's tokens). Equal tokens prove
        their shape, others bar it, unless the worker is odd. Where all are equal, barred shapes may
        be compared again."""
        differences = [
            Barred(target, shape, difference)
            for shape, pairs in outcomes.items()
            for own, engine in pairs
            if (difference := first_difference(own, engine)) is not None
        ]
        if outcomes:
            self._remember(model, target, worker, outcomes, differences)
        if self.odd(model, target, worker):
            self._unbar(model, target, lambda trust: trust.worker == worker)
            return differences
        for _, shape, difference in differences:
            self._trust(model, target, shape).bar(difference, worker)
        if outcomes and not differences:
            self._unbar(model, target, lambda _: True)
        differing = {shape for _, shape, _ in differences}
        for shape, pairs in outcomes.items():
            trust = self._trust(model, target, shape)
            if pairs and shape not in differing and trust.state is State.UNPROVEN:
                if shape != OTHER:
                    trust.state = State.PROVEN
                trust.compared += len(pairs)
        return differences

    def odd(self, model: str, target: Target, worker: str) -> list[Barred]:
        """Canaries that differ on this worker, while those of the same shape are equal on another
        worker of its engine; empty: the worker is not odd.
        """
        known = self._models.get(model)
        if known is None:
            return []
        return [
            barred
            for barred in known.workers.get(worker, ())
            if barred.target == target and known.equal.get((target, barred.shape))
        ]

    def unprove(self, model: str) -> None:
        """Has a model's shapes compared again, but for barred ones, since its configuration
        changed."""
        known = self._models.get(model)
        if known is None:
            return
        known.workers.clear()
        known.equal.clear()
        for shapes in known.targets.values():
            for trust in shapes.values():
                if trust.state is not State.BARRED:
                    trust.state, trust.compared = State.UNPROVEN, 0

    def barred(self, model: str) -> list[Barred]:
        """Shapes of a model whose tokens differed."""
        known = self._models.get(model)
        return [
            Barred(target, shape, trust.difference)
            for target, shapes in (known.targets.items() if known is not None else ())
            for shape, trust in shapes.items()
            if trust.difference is not None
        ]

    def _remember(
        self,
        model: str,
        target: Target,
        worker: str,
        shapes: Iterable[str],
        differing: list[Barred],
    ) -> None:
        """Records a worker's canaries: the shapes of all, and those that differed."""
        known = self._models.setdefault(model, _Model())
        known.forget(worker)
        known.workers[worker] = differing
        for shape in set(shapes) - {barred.shape for barred in differing}:
            known.equal.setdefault((target, shape), set()).add(worker)
        while len(known.workers) > WORKERS_MAX:
            known.forget(next(iter(known.workers)))

    def _unbar(self, model: str, target: Target, which: Callable[[Trust], bool]) -> None:
        """Has barred shapes of a target compared again, where `which` accepts their state."""
        for trust in self._shapes(model, target).values():
            if trust.state is State.BARRED and which(trust):
                trust.state, trust.compared, trust.difference = State.UNPROVEN, 0, None

    def _trust(self, model: str, target: Target, shape: str) -> Trust:
        return self._shapes(model, target).setdefault(self.shape(model, shape), Trust())

    def _shapes(self, model: str, target: Target) -> dict[str, Trust]:
        targets = self._models.setdefault(model, _Model()).targets
        if target not in targets:
            while len(targets) >= TARGETS_MAX:
                targets.popitem(last=False)
            targets[target] = {}
        return targets[target]


def first_difference(own: bytes, engine: bytes) -> Difference | None:
    """Where tokens (little-endian u32) first differ; None: they are equal."""
    if own == engine:
        return None
    ours, theirs = array("I", own), array("I", engine)
    index, end = 0, min(len(ours), len(theirs)) + 1  # the first `index` tokens are equal
    while end - index > 1:
        middle = (index + end) // 2
        if own[4 * index : 4 * middle] == engine[4 * index : 4 * middle]:
            index = middle
        else:
            end = middle
    return Difference(
        index,
        ours[index] if index < len(ours) else 0,
        theirs[index] if index < len(theirs) else 0,
    )
