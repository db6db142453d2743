"""Messages between a process and its children that render: a header and bytes, one after another.

Both ends are of the same release, so the form has no version.
"""

import struct
from typing import Any

import msgspec

from router.request.prompt_settings import RendererSettings

SIZES = struct.Struct("<II")
"""Beginning of a message: bytes of the header, then bytes of the content."""


class Job(msgspec.Struct, frozen=True):
    """One body to render, which is the frame's content; with an empty `kind` it loads a tokenizer
    only."""

    model: str
    settings: RendererSettings
    kind: str
    engine: str


class Done(msgspec.Struct, frozen=True):
    """The result of one job; the tokens are the frame's content."""

    count: int = 0
    usage_tokens: int = 0
    shape: str = ""
    digest: str = ""
    reason: str = ""
    """Why there are no tokens; empty: there are."""
    message: str = ""
    seconds: float = 0.0
    """Seconds of rendering in the child."""


_encode = msgspec.msgpack.Encoder().encode


def framed(header: msgspec.Struct, size: int) -> bytes:
    """Bytes to send before a content of `size` bytes."""
    encoded = _encode(header)
    return SIZES.pack(len(encoded), size) + encoded


def read_header(data: bytes, kind: type[Any]) -> Any:
    """Decodes a header as this type."""
    return msgspec.msgpack.decode(data, type=kind)
