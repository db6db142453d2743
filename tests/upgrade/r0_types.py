"""How the release r0 (see README.md) reads the event plane: its types, with their bounds.

Copied, and never changed: what is sent to that release must stay readable so.
"""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

VERSION = 1
FACTS_MAX = 4096
RING_MESSAGES_MAX = 1 << 14
WARM_TOKENS_MAX = 250000
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
SequenceNumber = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=4096)]
UnixSeconds = Annotated[float, Meta(ge=0, le=100000000000.0)]


class Epoch(NamedTuple):
    start_ns: int
    nonce: int


class Stored(msgspec.Struct, frozen=True, tag="stored", tag_field="kind", omit_defaults=True):
    hashes: bytes
    tier: str
    parent: int | None = None


class Removed(msgspec.Struct, frozen=True, tag="removed", tag_field="kind"):
    hashes: bytes
    tier: str


class Cleared(msgspec.Struct, frozen=True, tag="cleared", tag_field="kind", omit_defaults=True):
    tier: str | None = None


Fact = Stored | Removed | Cleared


class FactsMessage(msgspec.Struct, frozen=True, tag="facts", tag_field="kind"):
    v: int
    epoch: Epoch
    seq: SequenceNumber
    facts: Annotated[list[Fact], Meta(max_length=FACTS_MAX)]
    time_s: UnixSeconds


class Beat(msgspec.Struct, frozen=True, tag="beat", tag_field="kind"):
    v: int
    epoch: Epoch
    seq: SequenceNumber
    blocks: Count
    digest: int
    complete: bool
    time_s: UnixSeconds


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    v: int = VERSION
    epoch: Epoch
    address: Text
    engine: Name
    engine_version: Name = ""
    model: Name = ""
    model_aliases: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    lora_names: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    max_model_len: Count = 0
    block_size: Count = 0
    engine_block_size: Count = 0
    role: Name = "both"
    labels: Annotated[dict[Name, Name], Meta(max_length=256)] = {}
    multi_rank: bool = False
    priority_scheduling: Name = ""
    healthy: bool = True
    events: bool = True
    warms: bool = False
    running: Count = 0
    waiting: Count = 0
    used_blocks: Annotated[float, Meta(ge=0, le=1000000000.0)] | None = None
    total_blocks: Count | None = None
    total_slots: Count | None = None
    token_budget: Count | None = None
    preemptions: Count = 0
    sampled_at_s: UnixSeconds | None = None
    sent_at_s: UnixSeconds
    warnings: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    kv_connector: Name = ""
    kv_engine_id: Name = ""
    bootstrap_host: Name = ""
    bootstrap_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class SnapshotRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    v: int = VERSION
    chunk: int = 0
    epoch: Epoch | None = None
    as_of: int | None = None
    from_seq: int | None = None


class SnapshotChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    v: int
    epoch: Epoch
    as_of: SequenceNumber
    chunk: int
    chunks: int
    facts: Annotated[list[Stored], Meta(max_length=FACTS_MAX)] = []
    messages: Annotated[list[bytes], Meta(max_length=RING_MESSAGES_MAX)] = []
    complete: bool = True
    expired: bool = False


class Warm(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    v: int = VERSION
    id: Name
    tokens: Annotated[bytes, Meta(max_length=4 * WARM_TOKENS_MAX)] = b""
    lora_name: Name = ""
    cache_salt: Name = ""
    cancel: bool = False


class Warmed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    v: int = VERSION
    id: Name
    done: bool
    detail: Text = ""


class Hello(msgspec.Struct, frozen=True):
    v: int
    replica: Name


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    v: int
    id: Name
    action: Name
    worker_id: Name
    tombstone_s: float = 0.0
    at_s: UnixSeconds = 0.0


WORKERS_MAX = 8192
STEPS_MAX = 16
_Age = Annotated[float, Meta(ge=0, le=3600)]


class _Told(msgspec.Struct, frozen=True, array_like=True):
    worker_id: Name
    dp_rank: Annotated[int, Meta(ge=0, le=99999)]
    prefill_tokens: Count
    steps: Annotated[list[tuple[_Age, Count, Count]], Meta(min_length=1, max_length=STEPS_MAX)]


class Inflight(msgspec.Struct, frozen=True, tag="inflight", tag_field="kind"):
    v: int
    replica: Name
    epoch: Epoch
    seq: SequenceNumber
    full: bool
    workers: Annotated[list[_Told], Meta(max_length=WORKERS_MAX)]


READERS: dict[str, msgspec.msgpack.Decoder[msgspec.Struct]] = {
    "stream": msgspec.msgpack.Decoder(FactsMessage | Beat),
    "heartbeat": msgspec.msgpack.Decoder(Heartbeat),
    "request": msgspec.msgpack.Decoder(SnapshotRequest),
    "chunk": msgspec.msgpack.Decoder(SnapshotChunk),
    "hello": msgspec.msgpack.Decoder(Hello),
    "control": msgspec.msgpack.Decoder(Control),
    "warm": msgspec.msgpack.Decoder(Warm),
    "warmed": msgspec.msgpack.Decoder(Warmed),
    "inflight": msgspec.msgpack.Decoder(Inflight),
}
"""What a message is read as -> its reader."""
