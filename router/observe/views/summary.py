"""The console's numbers of a whole router: queue, streams, replicas, shadow policy. Pure."""

from collections.abc import Callable
from typing import Any

import msgspec

from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.decide.core.tally import PickTally
from router.decide.queue.views import sums
from router.observe.audit.observers import Watchers
from router.observe.audit.shadow_policy import Shadow
from router.observe.views.decisions import Decisions

TENANTS_MAX = 16
REPLICAS_MAX = 64


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a router that the console's messages are made of."""

    core: RouterCore
    admission: Admission
    watchers: Watchers
    tally: PickTally
    refused: Callable[[], dict[str, int]]
    """Returns the number of refused requests since the start, by reason."""
    connected: Callable[[], bool]
    about: dict[str, Any]
    """Values that do not change: name of the replica, version, time of the start and so on."""


class BandDepth(msgspec.Struct, frozen=True):
    """Waiting requests of a band."""

    band: str
    count: int
    oldest_s: float
    elsewhere: int
    """Requests of this band that wait in other replicas."""


class QueueNow(msgspec.Struct, frozen=True):
    """Requests that wait in this router."""

    waiting: int
    bands: list[BandDepth]
    """Waiting requests by band, the lowest band first."""
    tenants: list[tuple[str, int]]
    """Tenants with most waiting requests, and their number; the rest as `other`."""
    timeout_s: float
    """Seconds that a request waits at most, unless it says how long."""


class StreamsNow(msgspec.Struct, frozen=True):
    """Counts of the workers' event streams since the start."""

    gaps: int
    digest_mismatches: int
    recoveries: dict[str, int]
    """Source and result, such as `ring ok` -> number of recoveries."""
    pauses: int
    dropped: dict[str, int]
    """Messages that were not applied, by reason."""


class ReplicaNow(msgspec.Struct, frozen=True):
    """Another replica of the fleet, as its messages describe it."""

    replica: str
    age_s: float
    requests: int
    """Requests for which the replica holds reservations."""
    prefill_tokens: int
    waiting: int


class ShadowNow(msgspec.Struct, frozen=True):
    """Results of the shadow policy since it was configured."""

    policy: str
    agreement: dict[str, int]
    ttft_gain_s: float
    ttft_loss_s: float


class OtherwiseNow(msgspec.Struct, frozen=True):
    """Comparison of the policy `ttft` with the decisions that the console keeps."""

    decisions: int
    agreement: dict[str, int]
    sooner_s: float
    """Seconds by which first tokens would have come sooner by `ttft`, in sum; below 0: later."""
    overlap_tokens: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The present numbers of one router."""

    ready: bool
    connected: bool
    """Whether the router is connected to NATS."""
    policy: str
    picks: int
    refused: dict[str, int]
    """Reason -> requests refused since the start."""
    reservations: int
    index_blocks: int
    index_bytes: int
    guarded: int
    last_resorts: int
    over_estimate: int
    ejections: int
    queue: QueueNow
    streams: StreamsNow
    replicas: list[ReplicaNow]
    shadow: ShadowNow | None
    otherwise: OtherwiseNow


def _queue(admission: Admission, now_s: float) -> QueueNow:
    totals = sums(admission.queue, now_s)
    elsewhere = admission.fleet_turns.elsewhere()
    return QueueNow(
        totals.count,
        [
            BandDepth(band, depth.count, round(depth.oldest_s, 1), of_replicas.count)
            for (band, depth), of_replicas in zip(totals.bands.items(), elsewhere, strict=True)
        ],
        totals.largest_tenants(TENANTS_MAX),
        admission.queue.settings.timeout_s,
    )


def summary_of(subject: Subject, decisions: Decisions, now_s: float) -> Summary:
    """The present numbers of a router."""
    core, shadow = subject.core, subject.watchers.shadow
    stats = core.fleet.view.index.stats()
    return Summary(
        ready=core.fleet.ready,
        connected=subject.connected(),
        policy=core.routing.policy,
        picks=int(subject.tally.picks[0]),
        refused=subject.refused(),
        reservations=len(core.reservations),
        index_blocks=stats.blocks,
        index_bytes=stats.bytes,
        guarded=core.guarded,
        last_resorts=core.last_resorts,
        over_estimate=core.over_estimate_picks,
        ejections=sum(core.fleet.outliers.ejections.values()),
        queue=_queue(subject.admission, now_s),
        streams=_streams(core),
        replicas=_replicas(core, now_s),
        shadow=None if shadow is None else _shadow(shadow),
        otherwise=_otherwise(decisions),
    )


def _streams(core: RouterCore) -> StreamsNow:
    view = core.fleet.view
    return StreamsNow(
        view.gaps,
        view.drifts,
        {f"{how} {result}": count for (how, result), count in view.recoveries.items()},
        view.recovery_pauses,
        {reason: count for reason, count in view.dropped.items() if count},
    )


def _replicas(core: RouterCore, now_s: float) -> list[ReplicaNow]:
    replicas = core.fleet.replicas
    reserved, demand = replicas.reserved(), replicas.demand()
    return [
        ReplicaNow(
            replica,
            round(age_s, 1),
            reserved[replica].requests,
            reserved[replica].prefill_tokens,
            sum(each.waiting for each in demand.get(replica, ())),
        )
        for replica, age_s in sorted(replicas.ages_s(now_s).items())[:REPLICAS_MAX]
    ]


def _shadow(shadow: Shadow) -> ShadowNow:
    return ShadowNow(
        shadow.policy.name,
        {agreement.value: count for agreement, count in shadow.decisions.items()},
        shadow.ttft_s.gain,
        shadow.ttft_s.loss,
    )


def _otherwise(decisions: Decisions) -> OtherwiseNow:
    held = [each.otherwise for each in decisions.kept if each.otherwise is not None]
    agreement: dict[str, int] = {}
    for each in held:
        agreement[each.agreement] = agreement.get(each.agreement, 0) + 1
    return OtherwiseNow(
        len(held),
        agreement,
        sum(each.sooner_s for each in held),
        sum(each.overlap_tokens for each in held),
    )
