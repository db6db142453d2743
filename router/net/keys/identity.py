"""An identity: the owner of a key, and its rights. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings
from router.net.keys.rights import ALL, Right
from router.request.refusal import Reason, Refusal

TENANT_MAX = 256
INT32_MAX = (1 << 31) - 1
PRIORITY_MAX = 0
"""Greatest priority of a request through a gateway, unless its key sets another: a client may lower
a request's priority, and not raise it. Fair shares would not replace this bound: they change the
order of all requests, and priority still decides within a tenant's bands."""
EVERYTHING = ("*",)


class Allowance(Settings, frozen=True):
    """Limits of an identity in one process; None: no limit."""

    requests_per_s: Annotated[float, Meta(gt=0)] | None = None
    """Requests in a second: calls of Route, Explain and Render, and items of streams; a burst may
    have those of one second."""
    reservations: Annotated[int, Meta(ge=1)] | None = None
    """Reservations that are open at once, requests that wait for a worker included."""
    streams: Annotated[int, Meta(ge=1)] | None = None
    """Streaming calls that are open at once."""
    mib_per_s: Annotated[float, Meta(gt=0)] | None = None
    """MiB a second of messages to the router; a burst may have those of one second, and one
    message."""
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    """Greatest priority of a request; None: PRIORITY_MAX through a gateway, any over gRPC, whose
    callers set the priority of others' requests."""


NO_LIMITS = Allowance()


@dataclass(frozen=True, slots=True)
class Identity:
    """An identity as the key file describes it. Patterns have * and ? as in file names."""

    name: str
    rights: frozenset[Right] = ALL
    tenant: str = ""
    """Replaces the tenant that a request names; empty: a request may name any."""
    models: tuple[str, ...] = EVERYTHING
    """Patterns of the models that requests may name."""
    workers: tuple[str, ...] = EVERYTHING
    """Patterns of the worker ids that fleet commands may name, and that lists show."""
    limits: Allowance = NO_LIMITS

    @property
    def is_bounded(self) -> bool:
        """Whether requests have to be checked: against patterns of models, or limits."""
        return self.models != EVERYTHING or self.limits != NO_LIMITS

    def check_right(self, right: Right) -> None:
        """Raises Refusal if the identity lacks a right."""
        if right not in self.rights:
            raise _denied(f"this key lacks the right `{right}`", "right", right)

    def check_model(self, model: str) -> None:
        """Raises Refusal if the identity may not use a model. A request without a model needs the
        right to all.
        """
        if not self.may_use(model):
            raise _denied("this key is not for the model of the request", "field", "model")

    def check_body(self, model: str, adapters: Iterable[str], engine_fields: Sequence[str]) -> None:
        """Checks the models and fields of a request to an engine; raises Refusal. adapters: models
        that the body names instead of its model. engine_fields: names of the body's fields that are
        internal to engines and routers.
        """
        for name in (model, *adapters):
            self.check_model(name)
        if engine_fields and Right.ENGINE_FIELDS not in self.rights:
            first = engine_fields[0][:100]
            sentence = f"this key may not name {first!r}: it needs the right `engine_fields`"
            raise _denied(sentence, "field", first)

    @property
    def priority_max(self) -> int:
        """The highest priority that the identity's requests may have through a gateway."""
        return PRIORITY_MAX if self.limits.priority is None else self.limits.priority

    def may_use(self, model: str) -> bool:
        """Whether requests of the identity may name a model."""
        return _matches(model, self.models)

    def check_worker(self, worker_id: str) -> None:
        """Raises Refusal if the identity may not command a worker."""
        if not _matches(worker_id, self.workers):
            raise _denied("this key is not for this worker", "field", "worker_id")

    @property
    def sight(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Patterns of workers and models that lists show; None: they show all."""
        patterns = self.workers, self.models
        return None if patterns == (EVERYTHING, EVERYTHING) else patterns

    def may_see(self, worker_id: str, names: Iterable[str]) -> bool:
        """Whether lists show a worker to the identity. names: of the models that the worker
        serves.
        """
        return _matches(worker_id, self.workers) and (
            self.models == EVERYTHING or any(map(self.may_use, names))
        )


ANYBODY = Identity("anybody")
"""The caller of a listener without keys."""
UNIX = Identity("unix socket")
"""A caller without a key on a unix socket, whose file's permissions let it in."""


def unauthenticated() -> Refusal:
    """The refusal of every caller without a valid key; it gives no reason."""
    return Refusal(Reason.UNAUTHENTICATED, "the call has no valid key")


def _denied(sentence: str, name: str, value: str) -> Refusal:
    return Refusal(Reason.PERMISSION_DENIED, sentence, metadata={name: value})


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
