"""Errors that say why no tokens can be made of a body. Pure."""

from typing import Any

from typing_extensions import override

from router.request.refusal import Reason


class PromptError(Exception):
    """No tokens can be made of a body: an answer for its sender, not a fault of the router."""

    def __init__(self, reason: Reason, message: str, shape: str = "") -> None:
        """reason: one of REFUSED or ESTIMATED in router/request/tokens.py."""
        super().__init__(reason, message, shape)
        self.reason = reason
        self.message = message
        """One sentence for a person."""
        self.shape = shape
        """The body's shape; empty: the body could not be read."""

    @override
    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def malformed(message: str) -> PromptError:
    """The error (MALFORMED_BODY) for a body that every engine would refuse."""
    return PromptError(Reason.MALFORMED_BODY, message)


def unsupported(message: str) -> PromptError:
    """The error (UNSUPPORTED_CONTENT) for a body whose tokens only an engine can make."""
    return PromptError(Reason.UNSUPPORTED_CONTENT, message)


_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
}


def type_name(value: Any) -> str:
    """JSON type of a decoded value with its article, such as `an array`, for error messages."""
    return _TYPES.get(type(value), "an object")
