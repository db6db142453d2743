"""Admits a gRPC call: identifies its caller, and checks the right to the method."""

import logging
from collections.abc import Callable
from time import monotonic

from router.api.desk.counters import Metrics
from router.net.http2.calls import Call
from router.net.keys.door import CURRENT, Door
from router.net.keys.issuers import UnknownKeyError
from router.net.keys.key_ring import names_of
from router.net.keys.rights import RIGHTS
from router.net.keys.usage import Usage
from router.net.listener.addresses import UNIX_CLIENT
from router.net.listener.seldom import Seldom
from router.request.refusal import Reason, Refusal

_BEARER = "bearer "

log = logging.getLogger("kvroute.keys")


class Entrance:
    """Checks the callers of one gRPC server's methods."""

    def __init__(
        self, door: Door, metrics: Metrics, clock: Callable[[], float] = monotonic
    ) -> None:
        """clock: monotonic seconds."""
        self._door = door
        self._denied = metrics.calls_refused
        self._clock = clock
        self._logs: dict[tuple[str, str], Seldom] = {}
        """(method, reason) -> log lines about refused calls."""

    def guards(self, method: str) -> bool:
        """Whether a method needs a key. method: /package.Service/Method."""
        needs = method not in RIGHTS or RIGHTS[method] is not None
        if needs:
            for reason in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED):
                self._denied.labels(short(method), reason)
        return needs

    def enter(self, call: Call, size: int = 0) -> Usage:
        """Sets the current caller for an admitted call's task, and returns the caller's usage;
        raises Refusal over a limit of the caller. size: bytes of the call's message.
        """
        usage: Usage = call.entered
        CURRENT.set(usage)
        if size:
            usage.message(size)
        return usage

    def enter_by_head(self, call: Call, method: str) -> None:
        """Sets the caller of a call from its headers; raises Refusal, and UnknownKeyError if a key
        of its token's issuer must be fetched first."""
        call.entered = self._known(call)
        _check(call.entered, method)

    async def enter_after(self, call: Call, method: str, error: UnknownKeyError) -> None:
        """Sets a call's caller once the keys of its token's issuer are fetched; raises Refusal."""
        call.entered = await self._door.enter_after(
            error, _token(call) or "", lambda: names_of(call.certificate)
        )
        _check(call.entered, method)

    def refused(self, method: str, refusal: Refusal, call: Call) -> None:
        """Counts and logs a call without a valid key, or whose key lacks a right."""
        usage: Usage | None = call.entered
        name = short(method)
        self._denied.labels(name, refusal.reason).inc()
        caller = call.host if usage is None else f"identity {usage.identity.name!r}"
        seldom = self._logs.setdefault((name, refusal.reason), Seldom(log))
        seldom.log(self._clock(), "%s of %s refused: %s", name, caller, refusal.message)

    def _known(self, call: Call) -> Usage:
        token = _token(call)
        is_unix = token is None and call.host == UNIX_CLIENT
        return self._door.enter(token, lambda: names_of(call.certificate), is_unix=is_unix)


def _check(usage: Usage, method: str) -> None:
    right = RIGHTS.get(method)
    if right is None:
        raise Refusal(
            Reason.PERMISSION_DENIED, "no right allows this method, so no key can call it"
        )
    usage.identity.check_right(right)


def short(method: str) -> str:
    """Name of a method in metrics: Service/Method."""
    return method.removeprefix("/").rpartition(".")[2]


def _token(call: Call) -> str | None:
    """The bearer token of a call; None: the call has no authorization; empty: it has two, or
    another scheme."""
    values = [
        value
        for name, value in call.invocation_metadata()
        if name == "authorization" and isinstance(value, str)
    ]
    if not values:
        return None
    if len(values) > 1 or values[0][:7].lower() != _BEARER:
        return ""  # two, or of another scheme: no key of ours
    return values[0][7:].strip()
