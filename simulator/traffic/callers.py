"""Callers of a trace's requests: tenants and priorities, drawn by a seed, and SLOs. Pure.

Drawn tenants and priorities replace those of the trace; an SLO of the trace stays.

Laws: turns of a session have one tenant and one priority; the same seed gives the same callers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isfinite
from random import Random

from simulator.traffic.trace import Trace, TraceRequest

TENANTS_MAX = 10_000
PRIORITY_MIN, PRIORITY_MAX = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Priorities:
    """Priorities by chance, or by tenant; a request that gets none here keeps its priority of the
    trace."""

    shares: tuple[tuple[int, float], ...] = ()
    """Priority and its share of the requests or sessions; the shares add up to 1."""
    by_tenant: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Priorities":
        """Priorities from a text in one of three forms. Raises ValueError, which names the forms.

        trace                     as in the trace
        random:LOW,HIGH:SHARE     SHARE of the requests have HIGH, the others LOW; further
                                  priorities and shares follow with commas: random:0,10,20:0.5,0.2
        tenant:NAME=P,NAME=P      by tenant
        """
        form, _, rest = text.partition(":")
        try:
            match form:
                case "trace" if not rest:
                    return cls()
                case "random":
                    return cls(shares=_shares(rest))
                case "tenant":
                    pairs = (word.rpartition("=") for word in rest.split(","))
                    return cls(by_tenant={name: _priority(value) for name, _, value in pairs})
                case _:
                    pass
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}; {_FORMS}") from None
        raise ValueError(f"{text!r}: {_FORMS}")


_FORMS = "expected trace, random:LOW,HIGH:SHARE or tenant:NAME=PRIORITY,..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Callers:
    """The callers to draw for a trace. Raises ValueError for numbers out of bounds."""

    tenants: int = 0
    """Number of tenants to draw for requests or sessions, named tenant-1 and so on; 0: the trace's
    tenants stay."""
    skew: float = 1.0
    """Exponent s of Zipf's law: tenant k has a share of requests proportional to 1 / k^s."""
    priorities: Priorities = field(default_factory=Priorities)
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    """SLOs in seconds, of the time to first token and of the mean time between tokens, that a
    request without its own in the trace sends to the router; None: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.tenants <= TENANTS_MAX:
            raise ValueError(
                f"the number of tenants must be 0 to {TENANTS_MAX:,}, got {self.tenants:,}"
            )
        if not 0 <= self.skew <= 10:
            raise ValueError(f"the exponent of tenants' sizes must be 0 to 10, got {self.skew:g}")

    def of(self, trace: Trace, seed: int) -> Trace:
        """The trace with the tenants, priorities and SLOs of its callers, drawn by `seed`."""
        if self == Callers():
            return trace
        rng = Random(f"{seed}/callers")
        sizes = list(accumulate(k**-self.skew for k in range(1, self.tenants + 1)))
        known: dict[str, TraceRequest] = {}
        requests = []
        for request in trace.requests:
            first = known.get(request.session_id) if request.session_id else None
            if first is None:
                first = self._drawn(request, sizes, rng)
                if request.session_id:
                    known[request.session_id] = first
            requests.append(self._named(request, first))
        return replace(trace, requests=tuple(requests))

    def _drawn(self, request: TraceRequest, sizes: list[float], rng: Random) -> TraceRequest:
        """A session's first request, or a request without a session, with its drawn tenant and
        priority."""
        if sizes:
            number = rng.choices(range(len(sizes)), cum_weights=sizes)[0]
            request = replace(request, tenant=f"tenant-{number + 1}")
        if self.priorities.shares:
            values, weights = zip(*self.priorities.shares, strict=True)
            request = replace(request, priority=rng.choices(values, weights)[0])
        return request

    def _named(self, request: TraceRequest, first: TraceRequest) -> TraceRequest:
        """A request with the tenant and priority drawn for `first`, the first request of its
        session, and with its SLOs."""
        tenant = first.tenant if self.tenants else request.tenant
        priority = first.priority if self.priorities.shares else request.priority
        slo_s = self.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        return replace(
            request,
            tenant=tenant,
            priority=self.priorities.by_tenant.get(tenant or "", priority),
            ttft_slo_s=slo_s,
            tpot_slo_s=self.tpot_slo_s if request.tpot_slo_s is None else request.tpot_slo_s,
        )


def _shares(text: str) -> tuple[tuple[int, float], ...]:
    """Priorities and shares from `LOW,HIGH:SHARE`; the first priority has what the others leave."""
    words, _, numbers = text.partition(":")
    values = [_priority(word) for word in words.split(",")]
    others = [float(word) for word in numbers.split(",")]
    if len(values) != len(others) + 1:
        raise ValueError("expected a share for each priority but the first")
    rest = round(1.0 - sum(others), 12)  # decimals that add up to 1 need not do so as floats
    if not all(isfinite(share) and share >= 0 for share in (rest, *others)):
        raise ValueError("shares are 0 to 1, and add up to 1 at most")
    return tuple(zip(values, (rest, *others), strict=True))


def _priority(text: str) -> int:
    value = int(text)
    if not PRIORITY_MIN <= value <= PRIORITY_MAX:
        raise ValueError(f"priorities are {PRIORITY_MIN} to {PRIORITY_MAX}, got {value}")
    return value
