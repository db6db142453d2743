"""What a call must pass before anything of it is kept: whose it is, and how much it may send."""

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from router.net.http2.frames import MESSAGE_MAX, Status

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class RefusedError(Exception):
    """A call that is not let in, or whose message is too large."""

    def __init__(self, status: Status, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.metadata = metadata
        """Trailers beside the status."""


class Gate(Protocol):
    """Stands before the methods of a server, which are named /package.Service/Method. A call is a
    router.net.http2.calls.Call; the gate may keep whose it is in its `entered`."""

    def enter(self, call: Any, method: str) -> Coroutine[Any, Any, None] | None:
        """Lets a call in by its headers; a coroutine: only once this is through. Both raise
        RefusedError."""

    def bytes_max(self, method: str) -> int:
        """The most bytes that a message of a method may have."""

    def too_large(self, call: Any, method: str, size: int) -> RefusedError:
        """How a call with a message of so many bytes ends."""


class Open:
    """A gate that lets all in."""

    def __init__(self, bytes_max: int = MESSAGE_MAX) -> None:
        self._bytes_max = bytes_max

    def enter(self, call: object, method: str) -> None:
        """See Gate."""

    def bytes_max(self, method: str) -> int:
        """See Gate."""
        return self._bytes_max

    def too_large(self, call: object, method: str, size: int) -> RefusedError:
        """See Gate."""
        about = f"a message of {size} bytes; {self._bytes_max} bytes are the most"
        return RefusedError(Status.RESOURCE_EXHAUSTED, about)
