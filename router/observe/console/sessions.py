"""Sign-ins: the random id in a cookie stands for a key. Pure: no clock, no randomness of its own.

Laws:
- a session ends session_s after its beginning, and with its key;
- SESSIONS_MAX sessions are kept: a newcomer ends the oldest.
"""

from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import NamedTuple

SESSIONS_MAX = 256
SESSION_S = 43_200.0
"""Seconds after which a browser has to sign in again: a working day."""
ID_BYTES = 32


class Session(NamedTuple):
    """One sign-in."""

    token: str
    """The caller's key, which is checked again later: the session ends with a revoked key."""
    until_s: float


class Sessions:
    """All sign-ins to a router's console."""

    def __init__(self, session_s: float, random_bytes: Callable[[int], bytes]) -> None:
        """random_bytes: an unpredictable source, unless for a test."""
        self.session_s = session_s
        self._random_bytes = random_bytes
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, token: str, now_s: float) -> str:
        """Begins a session for a key, and returns the session's id."""
        self._forget_old(now_s)
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        session_id = urlsafe_b64encode(self._random_bytes(ID_BYTES)).decode().rstrip("=")
        self._sessions[session_id] = Session(token, now_s + self.session_s)
        return session_id

    def find(self, session_id: str, now_s: float) -> Session | None:
        """The session with an id; None: there is none, or its time is over."""
        session = self._sessions.get(session_id)
        if session is not None and now_s >= session.until_s:
            del self._sessions[session_id]
            return None
        return session

    def end(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def _forget_old(self, now_s: float) -> None:
        for session_id in [key for key, each in self._sessions.items() if now_s >= each.until_s]:
            del self._sessions[session_id]
