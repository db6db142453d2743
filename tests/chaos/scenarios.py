"""Runs whose faults are written down, not drawn; each with laws of its own. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.laws import Verdict
from tests.chaos.records import Cause, Observed, Served, Trouble
from tests.chaos.schedule import Fault, Sizes

SETTLED_S = 2.0
"""After which a router that is new, or a worker that fails, has been noticed."""
FAILURES_MAX = 0.01
GATEWAY_S = 30.0
"""For which clients of a gateway wait for each byte."""
LEFT_S = 10.0
"""A request without a byte has left a silent worker, and is served by another one: 3 s until the
relay says so, a look a second, and a machine that is busy."""
BACK_S = 30.0
"""Within which a worker that is well again gets requests."""


@dataclass(frozen=True)
class Scenario:
    """What goes wrong, and what must hold."""

    sizes: Sizes
    faults: tuple[Fault, ...]
    judge: Callable[[Observed], Sequence[Verdict]]
    mended_s: float
    """Traffic after the last fault."""
    gateways: bool = False
    """Clients send to the routers' gateways."""


def _of(run: Observed, *causes: Cause) -> list[Trouble]:
    return [one for one in run.troubles if one.cause in causes]


def _share(served: Sequence[Served]) -> str:
    failed = [one for one in served if one.failure]
    kinds = sorted({one.failure for one in failed})
    return f"{len(failed)} of {len(served)} failed: {', '.join(kinds)[:300]}"


def sick(run: Observed) -> list[Verdict]:
    """One engine answers 500 to half its requests, another takes them and never answers."""
    bad = _of(run, Cause.HALF, Cause.HANG)
    from_s, to_s = min(one.from_s for one in bad), max(one.to_s for one in bad)
    meant = [one for one in run.served if from_s + SETTLED_S <= one.began_s <= to_s]
    failed = [one for one in meant if one.failure and not (run.attempts and one.begun)]
    allowed = 0 if run.attempts else int(FAILURES_MAX * len(meant))
    law = f"at most {allowed} failures from {SETTLED_S:g} s after the first fault on"
    many = len(failed) > allowed
    verdicts = [Verdict(law, len(meant), len(failed) * many, True, (_share(meant),) * many)]
    for trouble in bad:
        back_s = min(
            (
                at.sent_s - trouble.to_s
                for one in run.served
                for at in one.attempts
                if at.worker == trouble.worker and not at.failure and at.sent_s > trouble.to_s
            ),
            default=None,
        )
        late = back_s is None or back_s > BACK_S
        told = "never" if back_s is None else f"after {back_s:.1f} s"
        law = f"{trouble.worker} ({trouble.cause.value}) is back in use within {BACK_S:g} s: {told}"
        verdicts.append(Verdict(law, 1, int(late), True))
    return verdicts


def without_routers(run: Observed) -> list[Verdict]:
    """All routers are killed; the clients' fallback serves on, and stops when one is back."""
    gone = _of(run, Cause.ROUTER)
    from_s, to_s = min(one.from_s for one in gone), min(one.to_s for one in gone)
    meant = [one for one in run.served if from_s - 1.0 <= one.began_s <= to_s]
    failed = [one for one in meant if one.failure]
    picks = [at for one in meant for at in one.attempts if not at.replica]
    back_s = [
        min(
            (
                at.sent_s - to_s
                for one in run.served
                if one.client == client
                for at in one.attempts
                if at.replica and at.sent_s > to_s
            ),
            default=None,
        )
        for client in range(run.clients)
    ]
    told = ", ".join("never" if one is None else f"{one:.1f} s" for one in back_s)
    late = [one for one in back_s if one is None or one > SETTLED_S]
    law = f"a router that is back is used within {SETTLED_S:g} s by each client: {told}"
    return [
        Verdict(
            f"no request fails while all routers are away ({len(picks)} fallback picks)",
            len(meant),
            len(failed),
            False,
            (_share(meant),) * bool(failed),
        ),
        Verdict(law, run.clients, len(late), True),
    ]


def rolling(run: Observed) -> list[Verdict]:
    """Every router is restarted, one after the other."""
    gone = _of(run, Cause.ROLLING)
    from_s, to_s = min(one.from_s for one in gone), max(one.to_s for one in gone)
    meant = [one for one in run.served if from_s - 1.0 <= one.began_s <= to_s + 1.0]
    failed = [one for one in meant if one.failure]
    law = "no request fails while the routers are restarted one after the other"
    return [Verdict(law, len(meant), len(failed), False, (_share(meant),) * bool(failed))]


def _innocent(run: Observed, guilty: frozenset[str] = frozenset()) -> Verdict:
    """Nobody is blamed for what another did."""
    blamed = [
        f"{router.name} blames {name} for {worker.blamed} requests"
        for router in run.routers
        for name, worker in router.workers.items()
        if worker.blamed and name not in guilty
    ]
    law = "no worker that is well is blamed"
    return Verdict(law, sum(len(router.workers) for router in run.routers), len(blamed), False,
                   tuple(blamed))  # fmt: skip


def _none_fails(run: Observed, law: str, *, allowed: str = "") -> Verdict:
    """allowed: a failure by which the router says that its own host can serve nobody."""
    failed = [one for one in run.served if one.failure and one.failure != allowed]
    return Verdict(law, len(run.served), len(failed), False, (_share(run.served),) * bool(failed))


def reuse(run: Observed) -> list[Verdict]:
    """Every engine closes its connections as they are used again."""
    return [
        _none_fails(run, "no request fails where connections close as they are used again"),
        _innocent(run),
    ]


def descriptors(run: Observed) -> list[Verdict]:
    """The routers open no further socket."""
    law = "without descriptors a request is served or gets 503, and no other failure"
    return [_none_fails(run, law, allowed="503"), _innocent(run)]


def cut_off(run: Observed) -> list[Verdict]:
    """A worker stops in the middle of everything, and closes no connection."""
    (stopped,) = _of(run, Cause.STOP)
    waited = [one for one in run.served if stopped.overlaps(one.began_s, one.ended_s)]
    slow = [
        one
        for one in waited
        if one.ended_s - one.began_s > LEFT_S
        and not (one.attempts and one.attempts[-1].worker == stopped.worker)
    ]
    law = f"a request without a byte leaves the worker that is cut off, within {LEFT_S:g} s"
    return [
        _none_fails(run, "no request fails while a worker is cut off"),
        _innocent(run, frozenset({stopped.worker})),
        Verdict(law, len(waited), len(slow), True),
    ]


FOUR = Sizes(workers=4, wired=0, well=2, routers=2, clients=2)
SCENARIOS: dict[str, Scenario] = {
    "sick": Scenario(
        sizes=FOUR,
        faults=(
            Fault(1.0, Cause.HALF, 40.0, workers=(0,)),
            Fault(1.0, Cause.HANG, 40.0, workers=(1,)),
        ),
        judge=sick,
        mended_s=BACK_S + 2.0,
    ),
    "without-routers": Scenario(
        sizes=FOUR,
        faults=(Fault(2.0, Cause.ROUTER, 10.0, routers=(0, 1)),),
        judge=without_routers,
        mended_s=10.0,
    ),
    "reuse": Scenario(
        sizes=FOUR,
        faults=tuple(Fault(1.0, Cause.REUSE, 10.0, workers=(i,)) for i in range(4)),
        judge=reuse,
        mended_s=2.0,
        gateways=True,
    ),
    "descriptors": Scenario(
        sizes=FOUR,
        faults=(Fault(1.0, Cause.DESCRIPTORS, 4.0, routers=(0, 1)),),
        judge=descriptors,
        mended_s=6.0,
        gateways=True,
    ),
    "cut-off": Scenario(
        sizes=FOUR,
        faults=(Fault(1.0, Cause.STOP, 20.0, workers=(0,)),),
        judge=cut_off,
        mended_s=5.0,
        gateways=True,
    ),
    "rolling": Scenario(
        sizes=FOUR,
        faults=(Fault(2.0, Cause.ROLLING, 0.0, routers=(0, 1)),),
        judge=rolling,
        mended_s=5.0,
    ),
}
