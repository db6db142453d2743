"""Engines' load and identity in one form, and the bounds of the documents that have them. Pure.

Law: a document is read whole or raises LoadUnreadable, whose reason is a sentence; values that are
read fit a heartbeat. Time and memory are linear in the document's size.

Blocks and block sizes are the engine's own. Engines count blocks *held by requests*: cached blocks
of finished requests are free to them, and not in these numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from events.engines.events import LoadSample

DOCUMENT_BYTES_MAX = 16 << 20
"""Bytes of a document; the largest page seen is 118 KiB, for two ranks."""
COUNT_MAX = (1 << 31) - 1
"""Requests, blocks or tokens held; same bound as in heartbeats (events/plane/facts.py)."""
BLOCK_SIZE_MAX = 1 << 20
"""Tokens of a block, as in the events (events/engines/wire.py)."""
COUNTER_MAX = 1 << 53
"""Tokens since an engine's start: a float represents every integer up to it."""
SHARE_MAX = 100.0
"""Share of blocks in use; real values are at most slightly above 1."""
UNIX_SECONDS_MAX = 1e11
"""Unix time, as in events/plane/facts.py: a time that a calendar can show."""
REASON_CHARS = 200
READ_ERRORS = (ValueError, OverflowError, RecursionError)
"""All errors of msgspec for unreadable documents."""
NAMES_MAX = 256
LORAS_MAX = 4096
"""Names of a model, and LoRAs; as in heartbeats."""
Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
TokenCounter = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
Signed = Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
"""A count; engines write -1 for no limit."""
Document = TypeVar("Document")
Number = TypeVar("Number", int, float)


class LoadUnreadable(ValueError):
    """A document that can't be used, not even in part."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:REASON_CHARS])
        self.reason = reason[:REASON_CHARS]


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's identity and limits. None: this engine doesn't report it."""

    model: str | None = None
    """The name that requests use."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""
    lora_names: tuple[str, ...] = ()
    """Adapters loaded now."""
    max_model_len: int | None = None
    """Prompt and output together, tokens."""
    version: str | None = None
    block_size: int | None = None
    """Tokens of a block, as in the events."""
    total_blocks: int | None = None
    """KV blocks of a rank."""
    total_slots: int | None = None
    """Requests that one rank runs at once."""
    token_budget: int | None = None
    """Tokens that one rank computes in a step at most."""
    dp_ranks: int | None = None
    priority_scheduling: bool | None = None
    low_priority_first: bool | None = None
    """Whether a lower number is served sooner, when priority_scheduling."""
    role: str | None = None
    """prefill or decode, if it serves half of each request."""
    bootstrap_port: int | None = None
    """Port of a prefill engine's bootstrap server."""
    troubles: tuple[str, ...] = ()
    """Why optional pages, such as /version, were left out: one sentence each."""
    kv_engine_ids: Mapping[int, str] = field(default_factory=dict)
    """Rank -> engine_id, by which vLLM's decode engines fetch its KV caches with Mooncake."""


class _ModelCard(Struct):
    id: Name
    parent: str | None = None
    max_model_len: Signed | None = None


class _Models(Struct):
    data: list[_ModelCard]


class _Version(Struct):
    version: Name


_MODELS = msgspec.json.Decoder(_Models)
VERSION = msgspec.json.Decoder(_Version)


def bounded(name: str, value: Number, limit: float = COUNT_MAX) -> Number:
    if not 0 <= value <= limit:  # NaN is not, either
        raise LoadUnreadable(f"{name} is {value}, outside 0 to {limit}")
    return value


def natural(value: int | None) -> int | None:
    """The value if it is positive; None: no limit, or absent."""
    return value if value is not None and value > 0 else None


def count(value: object) -> int | None:
    """A positive number of requests, blocks or tokens; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= COUNT_MAX else None


def positive(text: str | None) -> int | None:
    """The positive integer in a label of an info gauge; None for other texts, such as "None"."""
    if text is None or len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None


def set_blocks(
    load: LoadSample, page_size: int, used_tokens: float | None, total_tokens: int | None
) -> None:
    if not 1 <= page_size <= BLOCK_SIZE_MAX:
        raise LoadUnreadable(f"the page size is {page_size} tokens, outside 1 to {BLOCK_SIZE_MAX}")
    load.block_size = page_size
    load.used_blocks = None if used_tokens is None else used_tokens / page_size
    load.total_blocks = total_tokens // page_size if total_tokens else None


def read_models(document: bytes | str) -> tuple[str, tuple[str, ...], tuple[str, ...], int | None]:
    """(model, its other names, LoRA adapters, max_model_len) of /v1/models.

    Adapters are the entries with a parent; all other entries are names of the same model.
    """
    cards = read_json(document, _MODELS, "/v1/models").data
    names = [card for card in cards if card.parent is None]
    if not names:
        raise LoadUnreadable("/v1/models names no model")
    if len(names) > NAMES_MAX or len(cards) - len(names) > LORAS_MAX:
        raise LoadUnreadable(
            f"/v1/models has {len(cards)} entries; {NAMES_MAX} names and {LORAS_MAX} LoRAs may be"
        )
    return (
        names[0].id,
        tuple(card.id for card in names[1:]),
        tuple(card.id for card in cards if card.parent is not None),
        names[0].max_model_len,
    )


def read_json(
    document: bytes | str, decoder: msgspec.json.Decoder[Document], what: str
) -> Document:
    if len(document) > DOCUMENT_BYTES_MAX:
        raise LoadUnreadable(
            f"the page {what} has {len(document)} bytes, more than {DOCUMENT_BYTES_MAX}"
        )
    try:
        return decoder.decode(document)
    except READ_ERRORS as error:
        raise LoadUnreadable(f"the page {what} can't be read: {error}") from None


def optional_json(
    document: bytes | str | None,
    decoder: msgspec.json.Decoder[Document],
    what: str,
    troubles: list[str],
) -> Document | None:
    """A page that an engine may lack; one that can't be read is left out, with a line in
    `troubles`."""
    if document is None:
        return None
    try:
        return read_json(document, decoder, what)
    except LoadUnreadable as error:
        troubles.append(error.reason)
        return None
