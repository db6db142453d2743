"""A request that was refused as one line of JSON, beside the lines of decisions. Pure.

A line has the reason, the request's terms, and the number of workers excluded for each reason;
where workers were scored, their numbers too, so that other policies can be computed on them. A line
has no prompt, session or tenant, and not the sentence that the client got, which may name them.
"""

import msgspec

from router.decide.decision.nobody_fits import NobodyFits
from router.observe.audit import logged_decision
from router.observe.audit.logged_decision import VERSION, LoggedDecision, capture
from router.request.refusal import Refused


class LoggedRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line about a refused request. Fields that the request left out, or that can't be read, are
    left out.
    """

    v: int
    at_s: float
    """Unix time."""
    replica: str
    reason: str
    """Reason as in router/request/refusal.py. No line of a decision has one."""
    request_id: str = ""
    model: str = ""
    role: str = ""
    policy: str = ""
    """The policy that the request named."""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    entries: dict[str, int] = {}
    """How many entries the request's lists and maps had, by the contract's names."""
    exclusions: dict[str, int] = {}
    """Reason why workers could not take the request -> number of these workers."""
    decision: LoggedDecision | None = None
    """The decision that ended without a pick; None: no worker was scored."""


def capture_refusal(refused: Refused, replica: str, hashes: bool) -> LoggedRefusal:
    """Takes from a refusal what its line needs; hashes: see `capture`."""
    refusal = refused.refusal
    decision = refusal.decision if isinstance(refusal, NobodyFits) else None
    scored = decision is not None and len(decision.pool) > 0
    return LoggedRefusal(
        v=VERSION,
        at_s=refused.at_s,
        replica=replica,
        reason=refused.refusal.reason,
        request_id=refused.request_id,
        model=refused.model,
        role=refused.role,
        policy=refused.policy,
        prompt_tokens=refused.prompt_tokens,
        output_tokens=refused.output_tokens,
        entries=dict(refused.entries),
        exclusions={} if decision is None else dict(decision.exclusions()),
        decision=capture(decision, replica, hashes) if decision and scored else None,
    )


def decode(content: bytes) -> LoggedDecision | LoggedRefusal:
    """Reads a line of the log; raises ValueError for an invalid or inconsistent one."""
    if _PROBE.decode(content).reason is None:
        return logged_decision.decode(content)
    line = _DECODER.decode(content)
    if line.v != VERSION:
        raise ValueError(f"the line has version {line.v}, but this release reads version {VERSION}")
    if line.decision is not None and logged_decision.checked(line.decision).picked is not None:
        raise ValueError("the line is of a refusal, but has a pick")
    return line


class _Probe(msgspec.Struct, frozen=True):
    """The field that distinguishes the kinds of lines."""

    reason: str | None = None


_PROBE = msgspec.json.Decoder(_Probe)
_DECODER = msgspec.json.Decoder(LoggedRefusal)
