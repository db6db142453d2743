"""What route() answers: a worker, its reservation, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from kvroute.v1 import Receipt, RouteResponse, router_pb2


@dataclass(frozen=True, slots=True)
class OverlapTokens:
    """How much of the prompt the worker holds, in tokens."""

    raw: int
    """The longest run of leading blocks, on any tier."""
    usable: int
    """What the engine will reuse of it; the sum of what is below."""
    device: int
    host: int
    disk: int
    predicted: int
    """Sent there, or reused there, and not told by its events."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A worker to try next, should the pick fail."""

    worker_id: str
    dp_rank: int | None
    address: str
    cost: float


@dataclass(frozen=True, slots=True)
class PrefillWorker:
    """The other half of a PREFILL_DECODE pair."""

    worker_id: str
    dp_rank: int | None
    address: str
    bootstrap_host: str
    bootstrap_port: int


@dataclass(frozen=True, slots=True)
class Pick:
    """The worker that serves a request best, reserved until a report or the lease ends it."""

    request_id: str
    reservation_id: str
    worker_id: str
    dp_rank: int | None
    """None for an engine with one rank; else the engine must be told, see `headers`."""
    address: str
    """Where the request goes, as the worker's relay or configuration gives it."""
    labels: Mapping[str, str] = field(repr=False)
    overlap_tokens: OverlapTokens
    new_tokens: int
    """Prompt tokens that the worker has yet to compute."""
    queue_ms: float
    """Time spent in the router's queue."""
    engine_priority: int | None
    """In that engine's own direction; None unless it schedules by priority."""
    lease_s: float
    """The reservation ends this long after the last report."""
    alternatives: tuple[Alternative, ...] = field(repr=False)
    prefill_worker: PrefillWorker | None = field(repr=False)
    response: RouteResponse = field(repr=False)
    """The answer as it came."""

    @classmethod
    def from_response(cls, request_id: str, response: RouteResponse) -> Self:
        """A pick of the router's answer to `request_id`. Never raises."""
        overlap = response.overlap_tokens
        return cls(
            request_id=request_id,
            reservation_id=response.reservation_id,
            worker_id=response.worker_id,
            dp_rank=_rank(response),
            address=response.address,
            labels=dict(response.labels),
            overlap_tokens=OverlapTokens(
                raw=overlap.raw,
                usable=overlap.usable,
                device=overlap.device,
                host=overlap.host,
                disk=overlap.disk,
                predicted=overlap.predicted,
            ),
            new_tokens=response.new_tokens,
            queue_ms=response.queue_ms,
            engine_priority=(
                response.engine_priority if response.HasField("engine_priority") else None
            ),
            lease_s=response.lease_s,
            alternatives=tuple(
                Alternative(other.worker_id, _rank(other), other.address, other.cost)
                for other in response.alternatives
            ),
            prefill_worker=(
                _prefill_worker(response.prefill_worker)
                if response.HasField("prefill_worker")
                else None
            ),
            response=response,
        )

    @property
    def receipt(self) -> Receipt:
        """The record of the decision, enough to recompute it by hand; empty if it was omitted."""
        return self.response.receipt

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that pin the request to the picked rank; empty for an engine with one."""
        return {} if self.dp_rank is None else {"X-data-parallel-rank": str(self.dp_rank)}


def _prefill_worker(message: router_pb2.PrefillWorker) -> PrefillWorker:
    return PrefillWorker(
        worker_id=message.worker_id,
        dp_rank=_rank(message),
        address=message.address,
        bootstrap_host=message.bootstrap_host,
        bootstrap_port=message.bootstrap_port,
    )


def _rank(
    message: RouteResponse | router_pb2.Alternative | router_pb2.PrefillWorker,
) -> int | None:
    return message.dp_rank if message.HasField("dp_rank") else None
