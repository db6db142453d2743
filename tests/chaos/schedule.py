"""Which faults come when: drawn from a seed. Pure.

Laws:
- the same seed and sizes have the same plan;
- at every moment at least `well` workers have no fault of their own, or three of eight;
- one router at most is stopped at a time, and none while a worker is drained: that takes both;
- every fault ends before the plan does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from tests.chaos.records import Cause


@dataclass(frozen=True)
class Sizes:
    """What there is to break."""

    workers: int = 8
    wired: int = 3
    """The first so many workers' relays reach their engine through proxies."""
    well: int = 3
    """Workers that are left alone, at least."""
    routers: int = 2
    clients: int = 4


@dataclass(frozen=True)
class Fault:
    """One fault. Only what its cause is about is set."""

    at_s: float
    cause: Cause
    for_s: float
    workers: tuple[int, ...] = ()
    client: int = 0
    routers: tuple[int, ...] = ()


WEIGHTS = {
    Cause.KILL: 4,
    Cause.STOP: 3,
    Cause.HANG: 2,
    Cause.ERRORS: 1,
    Cause.HALF: 2,
    Cause.PAGES: 2,
    Cause.RESTART: 3,
    Cause.RELAY: 2,
    Cause.WIRE_CUT: 1,
    Cause.WIRE_SLOW: 1,
    Cause.WIRE_CORRUPT: 1,
    Cause.LINE_CUT: 2,
    Cause.LINE_SLOW: 1,
    Cause.LINE_CORRUPT: 2,
    Cause.NATS: 1,
    Cause.DISK: 1,
    Cause.FLOOD: 1,
    Cause.DRAIN: 2,
    Cause.ROUTER_STOP: 2,
}
_WIRES = {Cause.WIRE_CUT, Cause.WIRE_SLOW, Cause.WIRE_CORRUPT}
_LINES = {Cause.LINE_CUT, Cause.LINE_SLOW, Cause.LINE_CORRUPT}
_FLEET = {Cause.NATS, Cause.DISK, Cause.FLOOD}
_ROUTERS = "routers"
"""Name of the target that a drain and a stopped router share."""
_SECONDS = {
    Cause.STOP: (1.0, 20.0),
    Cause.ROUTER_STOP: (1.0, 20.0),
    Cause.NATS: (1.0, 8.0),
    Cause.FLOOD: (2.0, 5.0),
    Cause.RESTART: (0.0, 0.0),
    Cause.RELAY: (0.5, 5.0),
}
_OTHERWISE_S = (2.0, 15.0)
_BREATH_S = 3.0
"""Between two faults of one target, for what it lost to come back."""
_LATER = 3
"""Faults between one that found no target and its next try."""
_MASS_EVERY_S = 90.0
"""Five of eight workers are killed at once so often, and once in any plan."""


def plan(
    rng: random.Random, seconds: float, every_s: float, sizes: Sizes, longest_s: float = 20.0
) -> list[Fault]:
    """Faults from 0 to `seconds`, in order, one in `every_s` on average.

    Each cause comes once before any comes twice, as far as the time lasts, so that a short plan
    doesn't happen to be an easy one.
    """
    masses = _masses(rng, seconds, sizes, longest_s)
    faults = list(masses)
    busy: dict[str, float] = {}
    """Target -> when it may have the next fault."""
    fresh: list[Cause] = []
    at_s = 0.0
    while True:
        at_s += rng.uniform(0.3, 1.7) * every_s
        if at_s >= seconds:
            return sorted(faults, key=lambda one: one.at_s)
        if not fresh:
            fresh = _shuffled(rng, sizes)
        cause = fresh.pop()
        for_s = min(_duration(rng, cause), longest_s, seconds - at_s)
        if cause not in _LINES | _FLEET | {Cause.ROUTER_STOP}:
            for_s = min(for_s, _until_mass(masses, at_s))
        found = _fault(rng, at_s, cause, for_s, sizes, busy) if for_s >= 0.0 else []
        faults += found
        if not found:  # its targets are busy: it comes again after a few others
            fresh.insert(max(0, len(fresh) - _LATER), cause)


def _duration(rng: random.Random, cause: Cause) -> float:
    return rng.uniform(*_SECONDS.get(cause, _OTHERWISE_S))


def _masses(rng: random.Random, seconds: float, sizes: Sizes, longest_s: float) -> list[Fault]:
    """Kills of five eighths of the workers at once, about evenly over the time."""
    count = max(1, int(seconds / _MASS_EVERY_S))
    share_s = seconds / count
    found = []
    for i in range(count):
        at_s = (i + rng.uniform(0.3, 0.6)) * share_s
        for_s = min(_duration(rng, Cause.KILL), longest_s, 0.3 * share_s)
        workers = rng.sample(range(sizes.workers), max(1, sizes.workers * 5 // 8))
        found.append(Fault(at_s, Cause.KILL, for_s, workers=tuple(workers)))
    return found


def _until_mass(masses: Sequence[Fault], at_s: float) -> float:
    """Seconds for which one worker's own fault may last; negative: none may begin."""
    for mass in masses:
        if at_s <= mass.at_s + mass.for_s + _BREATH_S:
            return mass.at_s - _BREATH_S - at_s
    return inf


def _shuffled(rng: random.Random, sizes: Sizes) -> list[Cause]:
    """All causes by their weights, in an order in which the first of each comes before seconds."""
    causes = [one for one in WEIGHTS if sizes.wired or one not in _WIRES]
    causes = [one for one in causes if sizes.routers > 1 or one is not Cause.ROUTER_STOP]
    first = rng.sample(causes, len(causes))
    again = [one for one in causes for _ in range(WEIGHTS[one] - 1)]
    return rng.sample(again, len(again)) + first


def _fault(
    rng: random.Random,
    at_s: float,
    cause: Cause,
    for_s: float,
    sizes: Sizes,
    busy: dict[str, float],
) -> list[Fault]:
    """A fault of this cause on a target that has none; nothing when there is no such target."""

    def free(name: str) -> bool:
        return busy.get(name, 0.0) <= at_s

    def take(name: str) -> None:
        busy[name] = at_s + for_s + _BREATH_S

    routers = list(range(sizes.routers))
    if cause in _FLEET:
        if not free(cause):
            return []
        take(cause)
        return [Fault(at_s, cause, for_s, routers=tuple(routers))]
    if cause in _LINES:
        client = rng.randrange(sizes.clients)
        if not free(f"client {client}"):
            return []
        take(f"client {client}")
        of = routers if rng.random() < 0.2 else [rng.choice(routers)]
        return [Fault(at_s, cause, for_s, client=client, routers=tuple(of))]
    if cause in {Cause.ROUTER_STOP, Cause.DRAIN} and not free(_ROUTERS):
        return []
    if cause is Cause.ROUTER_STOP:
        take(_ROUTERS)
        return [Fault(at_s, cause, for_s, routers=(rng.choice(routers),))]
    idle = [i for i in range(sizes.workers) if free(f"worker {i}")]
    able = [i for i in idle if i < sizes.wired] if cause in _WIRES else idle
    if len(idle) <= sizes.well or not able:
        return []
    worker = rng.choice(able)
    take(f"worker {worker}")
    if cause is Cause.DRAIN:
        take(_ROUTERS)
    return [Fault(at_s, cause, for_s, workers=(worker,))]
