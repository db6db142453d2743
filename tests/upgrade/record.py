"""Records what this tree sends, for later trees to read: python tests/upgrade/record.py FOLDER

Run it in the tree of a release, with that tree's own environment. It writes

    messages.jsonl      the event plane's: what is read as what, and its bytes in base64
    calls.jsonl         gRPC's: every message of kvroute.v1 with all of its fields set
    descriptors.binpb   the FileDescriptorSet of kvroute.v1 and of what it imports
"""

import argparse
import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message

from events.feed.peers import Teller, Totals
from events.plane.facts import (
    VERSION,
    Beat,
    Cleared,
    Control,
    Epoch,
    FactsMessage,
    Heartbeat,
    Hello,
    Removed,
    SnapshotChunk,
    SnapshotRequest,
    Stored,
    Warm,
    Warmed,
    encode,
    pack_hashes,
)
from indexer.identity import WorkerKey
from indexer.index import mix_digest
from kvroute.v1 import fleet_pb2, prompts_pb2, router_pb2

EPOCH = Epoch(1_790_000_000_000_000_000, 77)
AT_S = 1_790_000_000.0
DEVICE, HOST = (11, 12, 13), (21,)
"""Blocks that the recorded stream leaves on each tier."""
_DEPTH_MAX = 4


class Load:
    """What a replica has reserved on a worker."""

    changed = True
    ours = Totals(3, 25, 400)

    def steps(self, since_s: float) -> list[tuple[float, int, int]]:
        return [(AT_S - 1.0, 0, 0), (AT_S - 0.8, 1, 10), (AT_S - 0.2, 3, 25)]


def event_plane() -> Iterator[tuple[str, bytes]]:
    """(what it is read as, its bytes), in the order in which one relay and one router send them."""
    first = [Stored(pack_hashes([11, 12]), "device"), Stored(pack_hashes([13, 14]), "device", 12)]
    second = [
        Removed(pack_hashes([14]), "device"),
        Cleared("host"),
        Stored(pack_hashes(HOST), "host"),
    ]
    digest = mix_digest(11 ^ 12 ^ 13, 21, 0)
    facts = [
        encode(FactsMessage(VERSION, EPOCH, seq, list(some), AT_S))
        for seq, some in ((1, first), (2, second))
    ]
    yield "heartbeat", encode(heartbeat())
    yield from (("stream", one) for one in facts)
    yield "stream", encode(Beat(VERSION, EPOCH, 2, 4, digest, True, AT_S))
    yield "request", encode(SnapshotRequest())
    yield "request", encode(SnapshotRequest(VERSION, 1, EPOCH, 2))
    yield "request", encode(SnapshotRequest(VERSION, 0, EPOCH, None, 1))
    held = [Stored(pack_hashes(DEVICE), "device"), Stored(pack_hashes(HOST), "host")]
    yield "chunk", encode(SnapshotChunk(VERSION, EPOCH, 2, 0, 1, held))
    yield "chunk", encode(SnapshotChunk(VERSION, EPOCH, 2, 1, 2, [], facts, False, True))
    yield "hello", encode(Hello(VERSION, "router-a"))
    for i, action in enumerate(("resync", "drain", "undrain", "drain", "remove")):
        tombstone_s = 30.0 if action == "remove" else 0.0
        control = Control(VERSION, f"router-a-{i}", action, "w0", tombstone_s, AT_S + i, "ops")
        yield "control", encode(control)
    tokens = b"".join(i.to_bytes(4, "little") for i in range(16))
    warm = Warm(id="copy-1", tokens=tokens, lora_name="lora", cache_salt="salt")
    yield "warm", encode(warm)
    yield "warm", encode(Warm(id="copy-1", cancel=True))
    yield "warmed", encode(Warmed(id="copy-1", done=False, detail="no time"))
    told = Teller("router-a", EPOCH).message({WorkerKey("w0", 0): Load()}, AT_S)
    if told is None:
        raise RuntimeError("a first message is always sent")
    yield "inflight", told


def heartbeat() -> Heartbeat:
    return Heartbeat(
        epoch=EPOCH,
        address="http://127.0.0.1:8000",
        engine="vllm",
        engine_version="0.26.0",
        model="m",
        model_aliases=("alias",),
        lora_names=("lora",),
        max_model_len=8192,
        block_size=16,
        engine_block_size=32,
        role="prefill",
        labels={"zone": "north"},
        multi_rank=True,
        priority_scheduling="lower",
        healthy=True,
        events=True,
        warms=True,
        running=2,
        waiting=1,
        used_blocks=7.5,
        total_blocks=100,
        total_slots=64,
        token_budget=4096,
        preemptions=3,
        sampled_at_s=AT_S,
        sent_at_s=AT_S,
        warnings=("a sentence",),
        kv_connector="NixlConnector",
        kv_engine_id="engine-1",
        bootstrap_host="127.0.0.1",
        bootstrap_port=8998,
    )


def calls() -> Iterator[Message]:
    """Every message type of the contract, with all of its fields set; of a oneof the last one."""
    for module in (router_pb2, fleet_pb2, prompts_pb2):
        for name in sorted(module.DESCRIPTOR.message_types_by_name):
            message = getattr(module, name)()
            fill(message)
            yield message


def fill(message: Message, depth: int = 0, known: Descriptor | None = None) -> None:
    """Sets every field of a message, and of those in it, down to a depth.

    known: the message in another release, whose oneofs have the last field that it knows.
    """
    for field in message.DESCRIPTOR.fields:
        other = known.fields_by_name.get(field.name) if known is not None else None
        if known is not None and other is None and field.containing_oneof is not None:
            continue
        if field.message_type is None:
            value = value_of(field)
            if many(field):
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        elif field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field.message_type, depth)
        elif depth < _DEPTH_MAX:
            inner = getattr(message, field.name)
            inner = inner.add() if many(field) else inner
            inner.SetInParent()
            fill(inner, depth + 1, other.message_type if other is not None else None)


def _fill_map(entries: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if value.message_type is None:
        entries[value_of(key)] = value_of(value)
    elif depth < _DEPTH_MAX:
        fill(entries[value_of(key)], depth + 1)


def many(field: FieldDescriptor) -> bool:
    return isinstance(field.default_value, list)


def value_of(field: FieldDescriptor) -> Any:
    """A value that is not the type's default, and another one for each number."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = f"text-{field.number}"
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_ENUM:
            return field.enum_type.values[1].number
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return field.number + 0.5
        case _:
            return field.number


def descriptors() -> FileDescriptorSet:
    """The contract's files after those that they import."""
    found: dict[str, FileDescriptor] = {}

    def add(file: FileDescriptor) -> None:
        for dependency in file.dependencies:
            add(dependency)
        found.setdefault(file.name, file)

    for module in (router_pb2, fleet_pb2, prompts_pb2):
        add(module.DESCRIPTOR)
    result = FileDescriptorSet()
    for file in found.values():
        file.CopyToProto(result.file.add())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"as": kind, "bytes": b64encode(payload).decode()})
        for kind, payload in event_plane()
    ]
    (folder / "messages.jsonl").write_text("\n".join(lines) + "\n")
    lines = [
        json.dumps(
            {
                "as": message.DESCRIPTOR.full_name,
                "bytes": b64encode(message.SerializeToString(deterministic=True)).decode(),
            }
        )
        for message in calls()
    ]
    (folder / "calls.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "descriptors.binpb").write_bytes(descriptors().SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
