"""Why a body has no tokens. Pure."""

from enum import StrEnum
from typing import Any

from typing_extensions import override


class PromptReason(StrEnum):
    """The reason on the wire, and a metric's label."""

    MALFORMED_BODY = "MALFORMED_BODY"
    """The engine would refuse this body, too: the client's fault."""
    TEMPLATE_REFUSED = "TEMPLATE_REFUSED"
    """The model's chat template raised an error on this body."""
    UNSUPPORTED_CONTENT = "UNSUPPORTED_CONTENT"
    """The engine may serve this body, but its tokens can't be computed here: images, options that
    only the engine knows."""
    NO_TOKENIZER = "NO_TOKENIZER"
    """The tokenizer's folder, or a package that reads it, is missing or unusable."""
    RENDERER_UNAVAILABLE = "RENDERER_UNAVAILABLE"
    """No process renders it, and no engine gives its tokens, at the moment."""
    RENDER_QUEUE_FULL = "RENDER_QUEUE_FULL"
    """The queue is full: as many bodies wait for their tokens as may."""
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    """More tokens or prompts than the settings allow."""


class PromptError(Exception):
    """A body without tokens: an answer for its sender, not a fault of the router."""

    def __init__(self, reason: PromptReason, message: str, shape: str = "") -> None:
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
    """A body that its engine would refuse, too."""
    return PromptError(PromptReason.MALFORMED_BODY, message)


def unsupported(message: str) -> PromptError:
    """A body whose tokens only an engine knows."""
    return PromptError(PromptReason.UNSUPPORTED_CONTENT, message)


def type_name(value: Any) -> str:
    """The JSON name of a decoded value's type, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
