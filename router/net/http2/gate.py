"""The check of a call's headers before any message of it is kept: whether its caller may call the
method, and how many bytes a message may have."""

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from router.net.http2.frames import MESSAGE_MAX, Status

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class RefusedError(Exception):
    """Raised by a gate or a handler, to end the call with a status."""

    def __init__(self, status: Status, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.metadata = metadata
        """Trailers beside the status."""


class Gate(Protocol):
    """Interface: checks the calls of a server's methods, which are named /package.Service/Method. A
    call is a router.net.http2.calls.Call; the gate may store its caller in `entered`.
    """

    def enter(self, call: Any, method: str) -> Coroutine[Any, Any, None] | None:
        """Checks a call's headers. Returns None, or a coroutine that goes on with the check if that
        has to wait. `enter` and the coroutine raise RefusedError.
        """

    def bytes_max(self, method: str) -> int:
        """Most bytes that a message of a method may have."""

    def too_large(self, call: Any, method: str, size: int) -> RefusedError:
        """The error that ends a call with a message of `size` bytes."""


class Open:
    """A gate that lets all calls in."""

    def __init__(self, bytes_max: int = MESSAGE_MAX) -> None:
        self._bytes_max = bytes_max

    def enter(self, call: object, method: str) -> None:
        """See Gate."""

    def bytes_max(self, method: str) -> int:
        """See Gate."""
        return self._bytes_max

    def too_large(self, call: object, method: str, size: int) -> RefusedError:
        """See Gate."""
        about = f"a message has {size} bytes, and {self._bytes_max} are the most"
        return RefusedError(Status.RESOURCE_EXHAUSTED, about)
