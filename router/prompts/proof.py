"""How far the router's own tokens are proven to be the engine's. Pure.

Trust is kept for a model, an engine with its version, and a shape of bodies.

Laws:
- a shape is proven by canaries, or by PROVEN_AFTER bodies in a row whose tokens were equal, and by
  nothing else;
- one difference bars a shape; it is compared again only after all canaries of its engine passed,
  since a reload or another worker made them run again;
- OTHER, which stands for all shapes over SHAPES_MAX of a model, is never proven;
- a model has TARGETS_MAX engines at most, the one that came first is forgotten.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

SHAPES_MAX = 256
"""Of a model."""
OTHER = "other"
"""The shape of all bodies whose own shape is over the bound."""
PROVEN_AFTER = 3
TARGETS_MAX = 8
"""Engines of a model, with their versions."""


class State(StrEnum):
    """Of a shape; the label of a metric."""

    UNPROVEN = "unproven"
    PROVEN = "proven"
    BARRED = "barred"


class Target(NamedTuple):
    """An engine as far as it decides on tokens."""

    engine: str
    version: str


class Difference(NamedTuple):
    """Where the tokens of one body first differ."""

    at: int | None
    """Index of the token; None: only the counts are known."""
    own: int
    """The router's token there, or its count; 0: its tokens end before."""
    engine: int
    """The same, of the engine."""


@dataclass(slots=True)
class Trust:
    """In one shape."""

    state: State = State.UNPROVEN
    compared: int = 0
    """Bodies in a row whose tokens were equal."""
    difference: Difference | None = None
    """What barred it."""


@dataclass(slots=True)
class _Model:
    shapes: set[str] = field(default_factory=set)
    targets: "OrderedDict[Target, dict[str, Trust]]" = field(default_factory=OrderedDict)


class Proof:
    """Of all models."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self.differences = 0
        """Bodies whose tokens, or their count, differed."""

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
        self, model: str, target: Target, shape: str, own: bytes, engine: bytes
    ) -> Difference | None:
        """Tokens of one body, ours and the engine's; the difference, which bars the shape."""
        difference = first_difference(own, engine)
        trust = self._trust(model, target, shape)
        if difference is not None:
            self._bar(trust, difference)
        elif trust.state is State.UNPROVEN:
            trust.compared += 1
            if trust.compared >= PROVEN_AFTER and shape != OTHER:
                trust.state = State.PROVEN
        elif trust.state is State.PROVEN:
            trust.compared += 1
        return difference

    def count(
        self, model: str, target: Target, shape: str, own: int, engine: int
    ) -> Difference | None:
        """An answer's own count of its prompt's tokens; the difference, which bars the shape.

        Equal counts prove nothing: other tokens may be as many.
        """
        if own == engine:
            return None
        difference = Difference(None, own, engine)
        self._bar(self._trust(model, target, shape), difference)
        return difference

    def canaries(
        self, model: str, target: Target, outcomes: dict[str, list[tuple[bytes, bytes]]]
    ) -> list[tuple[str, Difference]]:
        """Tokens of canaries by shape, each ours and the engine's: equal ones prove their shape,
        others bar it. Where all are equal, barred shapes may be compared again. The differences."""
        differences = [
            (shape, difference)
            for shape, pairs in outcomes.items()
            for own, engine in pairs
            if (difference := first_difference(own, engine)) is not None
        ]
        for shape, difference in differences:
            self._bar(self._trust(model, target, shape), difference)
        if outcomes and not differences:
            for trust in self._shapes(model, target).values():
                if trust.state is State.BARRED:
                    trust.state, trust.compared, trust.difference = State.UNPROVEN, 0, None
        differing = {shape for shape, _ in differences}
        for shape, pairs in outcomes.items():
            trust = self._trust(model, target, shape)
            if pairs and shape not in differing and trust.state is State.UNPROVEN:
                if shape != OTHER:
                    trust.state = State.PROVEN
                trust.compared += len(pairs)
        return differences

    def unprove(self, model: str) -> None:
        """The model's configuration changed: what was proven has to be compared again."""
        known = self._models.get(model)
        for shapes in known.targets.values() if known is not None else ():
            for trust in shapes.values():
                if trust.state is not State.BARRED:
                    trust.state, trust.compared = State.UNPROVEN, 0

    def barred(self, model: str) -> list[tuple[Target, str, Difference]]:
        """Shapes of a model whose tokens differed."""
        known = self._models.get(model)
        return [
            (target, shape, trust.difference)
            for target, shapes in (known.targets.items() if known is not None else ())
            for shape, trust in shapes.items()
            if trust.difference is not None
        ]

    def forget(self, model: str) -> None:
        """Nobody serves the model any more."""
        self._models.pop(model, None)

    def _bar(self, trust: Trust, difference: Difference) -> None:
        self.differences += 1
        trust.state, trust.compared, trust.difference = State.BARRED, 0, difference

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
    """Where tokens (little-endian u32) first differ; None: they are the same."""
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
