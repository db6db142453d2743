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
"""Separator of the X-Request-Id of a client's HTTP request and what makes the id of its Route
unique."""

Fingerprint = tuple[int, int, str, str]
"""The meaning of a request id: the prompt, by its fingerprint in a block size; the model's name,
the role."""


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of a session's last request."""

    worker: WorkerKey
    """The worker of its answer."""
    model: str
    """The model's name, as the request gave it."""
    lora_name: str
    block_size: int
    """0: the worker's was unknown."""
    prefixes: HashArray
    """Hashes of the prompt's full blocks."""
    prompt_tokens: int
    picked_at_s: float
    announced_at_s: float = -inf
    """When other replicas got this worker, or were to get it."""


class Objective(msgspec.Struct, frozen=True):
    """Times that a caller wants its answer in."""

    ttft_s: float | None
    """Seconds from arrival to the first token, above 0; None: no wish."""
    due_s: float
    """When the first token is due, on the router's clock; inf: no wish."""
    tpot_s: float | None
    """Mean seconds between tokens, above 0; None: no wish."""
    sheddable: bool
    """Whether its priority is below 0: it waits rather than take a worker that misses."""

    def covers(self, other: "Objective") -> bool:
        """Whether these times are as long as another's, or longer."""
        ttft_s, tpot_s = self.ttft_s or inf, self.tpot_s or inf
        return ttft_s >= (other.ttft_s or inf) and tpot_s >= (other.tpot_s or inf)


class Role(StrEnum):
    """The work that a request wants a worker for."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"
    """Two workers, or one (router/decide/decision/pairs.py). No worker has this role."""


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
    """Narrowing to some workers, by its prompt's LoRA, too; None: any worker of its model and role
    may take it."""
    charged_tokens: int = 0
    """Tokens by which a tenant's quota counts an estimated prompt until its engine has counted it;
    0: the prompt's length is no estimate."""
    observed: bool = False
    """Whether another router serves the request, so that nothing is reserved."""
    objective: Objective | None = None
    """None: the caller named none."""
    resumed: Session | None = None
    """The session that the prompt was made of, when only a session was named."""

    def fingerprint(self, block_size: int) -> Fingerprint:
        """Value that two requests with the same id must share; block_size: of the prompt's
        fingerprint.
        """
        return self.prompt.fingerprint(block_size), block_size, self.model, self.role


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request may wait, as its caller gave it."""

    priority: int = 0
    """Higher is sooner."""
    timeout_s: float | None = None
    """The longest wait; None: as configured, 0: none."""
    deadline_s: float = inf
    """When the caller's call ends, on the router's clock."""
    ttft_slo_s: float | None = None
    """Seconds from arrival to the first token, as the caller wants it; None: no wish."""
    waited_s: float = 0.0
    """Seconds in routers that are gone, as the caller says; they count once one is gone."""
