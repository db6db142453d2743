"""Signatures on fleet commands between routers.

    give ──> sealed ──control──> opened ──> ControlDesk

The signed body travels in the command beside the plain fields, which releases without signatures
read. A receiver that can check the signature takes the body and ignores the plain fields.

Laws:
- a command whose signature is wrong, is of another fleet, came before, or was signed WINDOW_S from
  now, is refused and counted, whatever `control.require_signed` is;
- a body is accepted once while its time counts: where the nonces of that time are too many to be
  kept, older times count no longer.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import inf

import msgspec

from events.plane.facts import Control
from router.keys.control_keys import ControlKeys

WINDOW_S = 300.0
"""Between the clocks of signer and receiver, as in Kerberos (RFC 4120, "acceptable clock skew")."""
NONCES_MAX = 1 << 14
"""More than the commands in force that a replica repeats (DRAINED_MAX)."""
NONCE_BYTES = 16
WARN_S = 60.0
"""Least seconds between two log lines of a kind."""
RESULTS = ("signed", "unsigned", "unsigned_refused", "forged", "stale", "replayed")
_CONTEXT = b"kvroute fleet command 1\0"

log = logging.getLogger("kvroute")


class _Body(msgspec.Struct, frozen=True, array_like=True):
    fleet: str
    public: bytes
    nonce: bytes
    sent_s: float
    control: Control


_decoder = msgspec.msgpack.Decoder(_Body)


class Seal:
    """Signs commands, and checks those of others."""

    def __init__(
        self,
        keys: ControlKeys | None,
        *,
        fleet: str,
        require_signed: bool,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """keys: None signs nothing, and takes every command as unsigned."""
        self._keys = keys
        self._fleet = fleet
        self._require_signed = require_signed
        self._clock = clock
        self._random_bytes = random_bytes
        self._nonces: OrderedDict[bytes, float] = OrderedDict()
        """Nonces of accepted bodies, the one that came first in front -> when signed."""
        self._floor_s = -inf
        """Bodies signed until then are refused: their nonces are forgotten."""
        self._warned_s: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """Commands received, by result (RESULTS)."""

    def sealed(self, control: Control) -> Control:
        """A command as it is sent."""
        if self._keys is None:
            return control
        nonce = self._random_bytes(NONCE_BYTES)
        body = msgspec.msgpack.encode(
            _Body(self._fleet, self._keys.public, nonce, self._clock(), control)
        )
        signature = self._keys.sign(_CONTEXT + body)
        return msgspec.structs.replace(control, body=body, signature=signature)

    def opened(self, control: Control) -> Control | None:
        """The command in a message; None: it is refused."""
        if self._keys is None or not control.signature:
            return self._unsigned(control)
        body = self._body(self._keys, control)
        now_s = self._clock()
        if body is None:
            self._refused("forged", control, "its signature is of no trusted router")
        elif not max(now_s - WINDOW_S, self._floor_s) < body.sent_s < now_s + WINDOW_S:
            self._refused("stale", control, f"it was signed {now_s - body.sent_s:.0f} s ago")
        elif body.nonce in self._nonces:
            self._refused("replayed", control, "it came before")
        else:
            self._remember(body.nonce, body.sent_s, now_s)
            self.counts["signed"] += 1
            return body.control
        return None

    def _unsigned(self, control: Control) -> Control | None:
        if self._require_signed:
            self._refused("unsigned_refused", control, "it is not signed")
            return None
        self.counts["unsigned"] += 1
        if self._keys is not None:
            self._warn("unsigned", "is not signed, and applied", control)
        return msgspec.structs.replace(control, body=b"", signature=b"")

    def _body(self, keys: ControlKeys, control: Control) -> _Body | None:
        """The signed body; None: it is not from a trusted router of this fleet."""
        try:
            body = _decoder.decode(control.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if body.fleet != self._fleet or len(body.nonce) != NONCE_BYTES or body.control.signature:
            return None
        signed = keys.verifies(body.public, _CONTEXT + control.body, control.signature)
        return body if signed else None

    def _remember(self, nonce: bytes, sent_s: float, now_s: float) -> None:
        while self._nonces:
            oldest_s = next(iter(self._nonces.values()))
            if oldest_s > now_s - WINDOW_S:
                if len(self._nonces) < NONCES_MAX:
                    break
                self._floor_s = max(self._floor_s, oldest_s)
            self._nonces.popitem(last=False)
        self._nonces[nonce] = sent_s

    def _refused(self, result: str, control: Control, why: str) -> None:
        self.counts[result] += 1
        self._warn(result, f"is refused: {why}", control)

    def _warn(self, kind: str, state: str, control: Control) -> None:
        now_s = self._clock()
        if now_s - self._warned_s.get(kind, -inf) >= WARN_S:
            self._warned_s[kind] = now_s
            log.warning(
                "command %r (%s worker %r) %s", control.id, control.action, control.worker_id, state
            )
