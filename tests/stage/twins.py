"""One story for two cores, of which one decides by the policies' kernels in C and the other by
their functions over rows: answers and state are compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from google.rpc.status_pb2 import Status
from prometheus_client import CollectorRegistry

from events.feed.replicas import Teller
from events.plane.facts import Epoch
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk import statuses
from router.api.desk.counters import Metrics
from router.api.desk.stream_items import RouteItems, read_batch
from router.api.service.calls import Guard
from router.decide.core.progress import Progress
from router.decide.decision import decider
from router.decide.decision.ranking import Kernel
from router.decide.policies.policy import Policy
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Refusal
from tests.stage.fleet import Fleet, hashes
from tests.stage.served import desk_of


@dataclass
class Side:
    """A fleet behind the bytes that a server gets."""

    native: bool = True
    """Whether it decides by kernels, of the policies that have one."""
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = Fleet(index=NativeIndex(), **self.about)
        self.metrics = Metrics(CollectorRegistry())
        guard = Guard.of(1 << 20, self.metrics)
        self.desk = desk_of(self.fleet, self.metrics, guard.fault)
        self.items = RouteItems(self.desk.item, self.desk.cancel, self.desk.leave)
        self.by_kernel = 0
        """Pools of workers that a kernel has scored."""

    @contextmanager
    def deciding(self) -> Iterator[None]:
        kernel_of = decider._kernel_of

        def counted(policy: Policy) -> Kernel | None:
            kernel = kernel_of(policy) if self.native else None
            self.by_kernel += kernel is not None
            return kernel

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(decider, "_kernel_of", counted)
            yield

    def route(self, request: router_pb2.RouteRequest) -> router_pb2.RouteResponse | Status:
        try:
            with self.deciding():
                answer, _, _ = self.desk.route(request.SerializeToString())
        except Refusal as refusal:
            return statuses.write_status(refusal)
        return router_pb2.RouteResponse.FromString(answer)

    def decide(self, batch: router_pb2.RouteBatch) -> list[router_pb2.RouteResult]:
        with self.deciding():
            return [
                result
                for message in self.items.decide(read_batch(batch.SerializeToString()))
                if message is not None
                for result in router_pb2.RouteResults.FromString(message).results
            ]

    def requests(self, outcome: str, reason: str) -> float:
        labels = {"outcome": outcome, "reason": reason}
        return self.metrics.registry.get_sample_value("kvroute_requests_total", labels) or 0

    def state(self) -> dict[str, Any]:
        """All that a request can change."""
        core, index = self.fleet.core, self.fleet.view.index
        core.fleet.pools.refresh()
        tally = self.metrics.tally
        return {
            "loads": {key: repr(load) for key, load in core.fleet.loads.items()},
            "columns": core.fleet.pools.columns.tolist(),
            "over_estimate": (
                sorted(core.fleet.pools.written.over_estimate),
                core.over_estimate_picks,
            ),
            "reservations": [
                repr(_readable(one)) for one in core.reservations._by_request.values()
            ],
            "predicted": [
                (index.predicted(one.slot), index.count(one.slot), index.digest(one.slot))
                for one in self.fleet.view.sources.values()
            ],
            "sessions": {
                name: repr(replace(one, prefixes=one.prefixes.tolist()))
                for name, one in core.fleet.sessions._known.items()
            },
            "random": core._rng.getstate(),
            "endings": core.endings,
            "outliers": (repr(core.fleet.outliers), core.fleet.outliers._standings),
            "tally": [one.tolist() for one in (tally.tokens, tally.recent, tally.picks)],
            "pools": tally.pools(),
            "answers": core.fleet.answers.by_pool,
            "ignored priorities": core.fleet.ignored_priorities,
            "stages": {name: int(took.counts.sum()) for name, took in tally.stages.items()},
            "predictions": (
                tally.ttfts,
                tally.ttft_s,
                tally.ttft_best_s,
                vars(core.ttft_check),
                vars(core.tpot_check),
            ),
            "rates": (
                core.fleet.rates._workers,
                core.fleet.rates.under_way,
                core.fleet.rates._columns.tolist(),
                core.fleet.pools.others_waiting.tolist(),
            ),
            "working sets": (
                {
                    key: (one.slot, one.blocks.entries())
                    for key, one in core.fleet.working_sets._of_worker.items()
                },
                core.fleet.working_sets._blocks.tolist(),
                len(core.fleet.working_sets),
            ),
            "counts": {
                (one.name, *one.labels.values()): one.value
                for family in self.metrics.registry.collect()
                for one in family.samples
                if one.name == "kvroute_requests_total"
            },
        }


class Twins:
    """One story told to both."""

    def __init__(self, **about: Any) -> None:
        self.sides = Side(native=True, about=about), Side(native=False, about=about)
        self._teller = Teller("there", Epoch(1, 0))
        self._theirs: dict[WorkerKey, WorkerLoad] = {}

    def tell(self, name: str, *args: Any, **about: Any) -> None:
        for side in self.sides:
            getattr(side.fleet, name)(*args, **about)

    def hear(self, key: WorkerKey) -> None:
        """Another replica reserves something."""
        now_s = self.sides[0].fleet.now_s
        self._theirs.setdefault(key, WorkerLoad()).open(hashes([1, 2]), True, 40, now_s)
        message = self._teller.message(self._theirs, now_s)
        assert message is not None
        for side in self.sides:
            side.fleet.core.on_inflight(message, now_s)

    def route(self, request: router_pb2.RouteRequest) -> router_pb2.RouteResponse | Status:
        answer, expected = (side.route(request) for side in self.sides)
        assert same(answer, expected)
        self.compare()
        return answer

    def decide(self, batch: router_pb2.RouteBatch) -> list[router_pb2.RouteResult]:
        results, expected = (side.decide(batch) for side in self.sides)
        assert [one.index for one in results] == [one.index for one in expected]
        for one, other in zip(results, expected, strict=True):
            assert same(one, other)
        self.compare()
        return results

    def report(self, progress: Progress) -> None:
        one, other = (side.fleet.core.report(progress, side.fleet.now_s) for side in self.sides)
        assert one is other
        self.compare()

    def compare(self) -> None:
        by_kernel, by_function = (side.state() for side in self.sides)
        for name, told in by_kernel.items():
            assert repr(told) == repr(by_function[name]), name  # a NaN is itself here


def same(one: Any, other: Any) -> bool:
    """Equal but for the order of maps; costs to the last bit."""
    deterministic: bool = one.SerializeToString(deterministic=True) == other.SerializeToString(
        deterministic=True
    )
    return deterministic


def _readable(one: Reservation) -> Reservation:
    return msgspec.structs.replace(
        one,
        answer=in_order(one.answer),
        prefixes=one.prefixes.tolist(),  # type: ignore[arg-type]
    )


def in_order(answer: bytes) -> bytes:
    return router_pb2.RouteResponse.FromString(answer).SerializeToString(deterministic=True)


def known(worker_id: str) -> WorkerKey:
    return WorkerKey(worker_id, 0)
