"""A caller's request, and how long it may wait. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

import msgspec

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.request.narrowing import Narrowing
from router.request.prompt import Prompt

CLIENT_ID_END = "~"
"""Separator in a request id of the gateway: the client's X-Request-Id is before it, and a suffix
that makes the id unique is after it."""

Fingerprint = tuple[int, int, str, str]
"""What a request id stands for: (the prompt's fingerprint, its block size, the model, the role)."""


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of a session's last request."""

    worker: WorkerKey
    """The worker that was picked for the request."""
    model: str
    """The model's name, as the request gave it."""
    lora_name: str
    block_size: int
    """Tokens of a block of `prefixes`; 0: the worker's block size was unknown."""
    prefixes: HashArray
    """PrefixHashes of the prompt's full blocks."""
    prompt_tokens: int
    picked_at_s: float
    announced_at_s: float = -inf
    """When this worker was last sent to other replicas, or became due to be sent, on the router's
    clock."""


class Objective(msgspec.Struct, frozen=True):
    """Latencies within which a caller wants its answer."""

    ttft_s: float | None
    """Seconds from arrival to the first token, above 0; None: no wish."""
    due_s: float
    """When the first token is due, on the router's clock; inf: no wish."""
    tpot_s: float | None
    """Mean seconds between tokens, above 0; None: no wish."""
    sheddable: bool
    """Whether the request's priority is below 0: it waits rather than take a worker that would miss
    these times."""

    def covers(self, other: "Objective") -> bool:
        """Whether each of these times is at least as long as that of `other`; no wish counts as
        infinite."""
        ttft_s, tpot_s = self.ttft_s or inf, self.tpot_s or inf
        return ttft_s >= (other.ttft_s or inf) and tpot_s >= (other.tpot_s or inf)


class Role(StrEnum):
    """The work that a request wants a worker for."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"
    """A prefill and a decode worker, or one worker for both (router/decide/decision/pairs.py). Only
    requests have this role, workers don't."""


class Request(msgspec.Struct, frozen=True):
    """A caller's request, checked, in the router's own types."""

    request_id: str
    prompt: Prompt
    model: str = ""
    role: Role = Role.BOTH
    expected_output_tokens: int | None = None
    policy: str = ""
    tenant: str = ""
    session_id: str = ""
    narrowing: Narrowing | None = None
    """Conditions on the worker, the prompt's LoRA among them; None: any worker of its model and
    role may take it."""
    charged_tokens: int = 0
    """Tokens that a tenant's quota is charged for a prompt of estimated length until its engine has
    counted it; 0: the length is no estimate."""
    observed: bool = False
    """Whether another router serves the request, so that this router reserves nothing for it."""
    objective: Objective | None = None
    """Latencies that the caller wants; None: it named none."""
    resumed: Session | None = None
    """The session whose last prompt stands for this request's prompt; None: the request has a
    prompt of its own."""

    def fingerprint(self, block_size: int) -> Fingerprint:
        """Value that two requests with the same id must share. block_size: tokens of a block, for
        the prompt's fingerprint."""
        return self.prompt.fingerprint(block_size), block_size, self.model, self.role


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request may wait in the queue, as its caller gave it."""

    priority: int = 0
    """Higher is sooner."""
    timeout_s: float | None = None
    """The longest wait in seconds; None: as configured, 0: no wait."""
    deadline_s: float = inf
    """When the caller's call ends, on the router's clock."""
    ttft_slo_s: float | None = None
    """Seconds from arrival to the first token, as the caller wants it; None: no wish."""
    waited_s: float = 0.0
    """Seconds that the request waited in routers that ended, as its caller says; they count once
    such a router is known to be gone."""
