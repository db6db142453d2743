"""Rolling upgrades: this tree reads what an earlier release sent, and is read by it."""

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message

from events.feed.demand import Demand
from events.feed.fleet_view import FleetView, schedulable
from events.feed.peers import Moved, Peers, Teller, Totals, Verdict, decode_inflight
from events.feed.stream import StreamState
from events.plane.facts import (
    Beat,
    Control,
    Heartbeat,
    Hello,
    SnapshotChunk,
    SnapshotRequest,
    Unreadable,
    Warm,
    Warmed,
    decode,
    decode_stream,
    encode,
    encode_heartbeat,
)
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from kvroute.v1 import fleet_pb2, router_pb2
from router.config.settings.queue_settings import QueueSettings
from router.core.admission import Admission
from router.replicas.fleet_commands import ControlDesk
from router.reservations.ids import ReservationIds
from tests.stage.fleet import Fleet
from tests.upgrade import r0_types
from tests.upgrade.record import (
    AT_S,
    DEVICE,
    EPOCH,
    HOST,
    Load,
    calls,
    event_plane,
    fill,
    heartbeat,
    many,
)

R0 = Path(__file__).parent / "r0"
KEY = WorkerKey("w0", 0)


def recorded(name: str) -> list[tuple[str, bytes]]:
    """(what it is read as, its bytes)"""
    lines = map(json.loads, (R0 / name).read_text().splitlines())
    return [(line["as"], b64decode(line["bytes"])) for line in lines]


MESSAGES = recorded("messages.jsonl")
CALLS = recorded("calls.jsonl")


def of_kind(kind: str) -> list[bytes]:
    return [payload for one, payload in MESSAGES if one == kind]


def plain(value: object) -> Any:
    """A message, or its bytes, as maps and lists."""
    raw = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return msgspec.msgpack.decode(raw)


def told(message: object) -> Any:
    """All of a message's fields, those too that its bytes leave out."""
    match message:
        case msgspec.Struct() if not message.__struct_config__.array_like:
            fields = {name: told(getattr(message, name)) for name in message.__struct_fields__}
            tag = message.__struct_config__.tag
            return fields if tag is None else fields | {"kind": tag}
        case list() | tuple():
            return [told(one) for one in message]
        case msgspec.Struct():
            return [told(getattr(message, name)) for name in message.__struct_fields__]
        case _:
            return message


def says(message: Any, sent: Any) -> bool:
    """Whether a message has all that was sent, as far as it knows it, and perhaps more."""
    if isinstance(sent, dict) and isinstance(message, dict):
        return all(says(message[name], value) for name, value in sent.items() if name in message)
    if isinstance(sent, list) and isinstance(message, list):
        return len(message) == len(sent) and all(map(says, message, sent))
    return bool(message == sent)


def stream(payload: bytes) -> object:
    message, dropped = decode_stream(payload)
    assert dropped == ()
    return message


READERS: dict[str, Callable[[bytes], object]] = {
    "stream": stream,
    "heartbeat": partial(decode, Heartbeat),
    "request": partial(decode, SnapshotRequest),
    "chunk": partial(decode, SnapshotChunk),
    "hello": partial(decode, Hello),
    "control": partial(decode, Control),
    "warm": partial(decode, Warm),
    "warmed": partial(decode, Warmed),
    "inflight": decode_inflight,
}


@pytest.mark.parametrize(("kind", "payload"), MESSAGES)
def test_every_message_of_the_event_plane_is_read_whole(kind: str, payload: bytes) -> None:
    message, sent = READERS[kind](payload), plain(payload)
    assert not isinstance(message, Unreadable)
    assert sent.keys() <= told(message).keys(), "no field was dropped"
    assert says(told(message), sent)


@pytest.mark.parametrize("index", [ReferenceIndex, NativeIndex])
def test_an_older_relays_worker_is_in_use(index: Callable[[], Any]) -> None:
    view = FleetView(index(), beat_timeout_s=3.0, forget_s=30.0, workers_max=4)
    for payload in of_kind("heartbeat"):
        assert view.on_heartbeat(KEY, payload, AT_S) is not None
    for payload in of_kind("stream"):
        assert view.on_stream(KEY, payload, AT_S) == []
    while view.backlogged:
        view.work(AT_S)
    source = view.sources[KEY]
    assert schedulable(source) == ""
    assert source.stream.state is StreamState.LIVE
    assert view.complete(source)
    assert view.index.told(source.slot) == len(DEVICE) + len(HOST)
    assert view.dropped.total() == view.drifts == 0


def test_an_older_relays_snapshot_is_a_workers_state() -> None:
    view = FleetView(ReferenceIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=4)
    beat = of_kind("stream")[-1]
    assert [pull.worker for pull in view.on_stream(KEY, beat, AT_S)] == [KEY]
    chunk = decode(SnapshotChunk, of_kind("chunk")[0])
    assert isinstance(chunk, SnapshotChunk)
    answer = (chunk.epoch, chunk.as_of, chunk.facts, chunk.complete)
    assert view.on_snapshot(KEY, *answer, AT_S) == []
    assert view.on_stream(KEY, beat, AT_S) == []
    assert view.sources[KEY].stream.state is StreamState.LIVE
    assert view.drifts == 0


def test_an_older_replicas_reserved_load_counts_and_ejects_nobody() -> None:
    peers = Peers("router-b")
    (payload,) = of_kind("inflight")
    assert peers.on_message(payload, AT_S) == {KEY}
    assert peers.heard(KEY, AT_S) == (Totals(3, 25, 400), (3, 25))
    assert peers.take_verdicts() == ("router-a", [])


def test_an_older_replica_says_nothing_of_what_waits_there_and_holds_no_request() -> None:
    fleet = Fleet(replica="router-b")
    fleet.add("w0")
    admission = Admission(fleet.core, QueueSettings(), Random(0))
    (payload,) = of_kind("inflight")
    fleet.core.on_inflight(payload, fleet.now_s)
    assert fleet.core.fleet.peers.demand() == {}
    assert admission.is_idle
    newer = Teller("router-c", EPOCH).message({}, AT_S, demand=[Demand("", "both", 0, 3)])
    assert newer is not None
    fleet.core.on_inflight(newer, fleet.now_s)
    assert fleet.core.fleet.peers.demand() == {"router-c": (Demand("", "both", 0, 3),)}
    assert not admission.is_idle


def test_an_older_replicas_commands_hold() -> None:
    fleet = Fleet()
    fleet.now_s = AT_S + 10.0
    desk = ControlDesk(fleet.core, fleet.clock)
    fleet.add("w0")
    drained = []
    for payload in of_kind("control"):
        control = decode(Control, payload)
        assert isinstance(control, Control)
        assert desk.apply(control) == 1
        drained.append("w0" in fleet.core.fleet.drained)
    assert drained == [False, True, False, True, True]
    assert desk.removed("w0")


def newest() -> Iterator[tuple[str, bytes]]:
    """What this tree sends; of every type one message has all of its fields."""
    yield from event_plane()
    ours = heartbeat()
    more = {"healthy": False, "events": False, "probed": False, "tells_salts": False}
    codes = {"warning_codes": ("relay_failing",), "loads_loras": True, "asleep": True}
    yield "heartbeat", encode_heartbeat(msgspec.structs.replace(ours, **more, **codes))
    yield "stream", encode(Beat(1, EPOCH, 2, 4, 5, False, AT_S, ("salts", "images")))
    verdicts = [Verdict(KEY, 2.5, "refused"), Verdict(WorkerKey("w1", 1), 0.5, "peer")]
    waiting = [Demand("m", "both", 10, 3, 1.5, 7, -0.5, ((1 << 63, 2),))]
    teller, moved = Teller("router-a", EPOCH), [Moved(7, KEY)]
    inflight = teller.message({KEY: Load()}, AT_S, verdicts, moved, waiting, waiting)
    assert inflight is not None
    yield "inflight", inflight
    fleet = Fleet(replica="router-a")
    fleet.add("w0")
    desk = ControlDesk(fleet.core, fleet.clock)
    for action in ("drain", "undrain", "remove", "resync"):
        control = desk.give(action, "w0", 30.0 if action == "remove" else 0.0)
        desk.apply(control)
        yield "control", encode(control)
    yield "control", encode(msgspec.structs.replace(control, body=b"body", signature=bytes(64)))
    yield from (("control", encode(control)) for control in desk.in_force())


@pytest.mark.parametrize(("kind", "payload"), list(newest()))
def test_an_older_release_reads_what_this_one_sends(kind: str, payload: bytes) -> None:
    message = r0_types.READERS[kind].decode(payload)
    assert says(told(message), plain(payload))


def test_here_is_a_message_with_each_field_of_each_type() -> None:
    seen: dict[type, set[str]] = {}
    for kind, payload in newest():
        message = READERS[kind](payload)
        seen.setdefault(type(message), set()).update(plain(payload))
    for kind, fields in seen.items():
        assert issubclass(kind, msgspec.Struct)
        assert set(kind.__struct_fields__) - {"v"} <= fields, (
            f"{kind.__name__}: send the others, too"
        )
    assert Heartbeat in seen


def test_an_older_replica_hands_reports_on_a_newer_ones_reservations_to_it() -> None:
    ours = ReservationIds("router-a", lambda count: bytes(range(256)) * (count // 256)).next()
    assert ours.rpartition("-")[0] == "router-a", "as r0 finds the owner"


class Contract:
    """kvroute.v1 as an earlier release has it."""

    def __init__(self, folder: Path) -> None:
        files = FileDescriptorSet.FromString((folder / "descriptors.binpb").read_bytes())
        self.pool = descriptor_pool.DescriptorPool()
        self.ours = []
        for file in files.file:
            self.pool.Add(file)
            if file.package == "kvroute.v1":
                self.ours.append(self.pool.FindFileByName(file.name))

    def message(self, name: str, payload: bytes) -> Message:
        kind = self.pool.FindMessageTypeByName(name)
        message: Message = message_factory.GetMessageClass(kind).FromString(payload)
        return message

    def made(self, name: str, **fields: object) -> Message:
        kind = self.pool.FindMessageTypeByName(name)
        message: Message = message_factory.GetMessageClass(kind)(**fields)
        return message


CONTRACT = Contract(R0)


def here(name: str, payload: bytes) -> Message:
    simple = name.rpartition(".")[2]
    kind = getattr(router_pb2, simple, None) or getattr(fleet_pb2, simple)
    message: Message = kind.FromString(payload)
    return message


def shape(field: FieldDescriptor) -> tuple[object, ...]:
    """What must never change of a field."""
    inner = field.message_type or field.enum_type
    return field.name, field.type, many(field), field.has_presence, inner and inner.full_name


def assert_message_kept(old: Descriptor, new: Descriptor) -> None:
    for field in old.fields:
        assert field.number in new.fields_by_number, f"{old.full_name}.{field.name} is gone"
        assert shape(new.fields_by_number[field.number]) == shape(field)


def assert_enum_kept(old: EnumDescriptor, new: EnumDescriptor) -> None:
    names = {value.number: value.name for value in new.values}
    assert {value.number: value.name for value in old.values}.items() <= names.items()


def test_no_field_value_or_method_of_the_contract_is_gone_or_another() -> None:
    for old, new in zip(CONTRACT.ours, (router_pb2.DESCRIPTOR, fleet_pb2.DESCRIPTOR), strict=True):
        assert old.name == new.name
        for name, message in old.message_types_by_name.items():
            assert_message_kept(message, new.message_types_by_name[name])
        for name, enum in old.enum_types_by_name.items():
            assert_enum_kept(enum, new.enum_types_by_name[name])
        for name, service in old.services_by_name.items():
            for method in service.methods:
                other = new.services_by_name[name].methods_by_name[method.name]
                assert signature(other) == signature(method)


def signature(method: Any) -> tuple[object, ...]:
    return (
        method.input_type.full_name,
        method.client_streaming,
        method.output_type.full_name,
        method.server_streaming,
    )


@pytest.mark.parametrize(("name", "payload"), CALLS)
def test_every_call_of_an_older_release_is_read_whole(name: str, payload: bytes) -> None:
    message = here(name, payload)
    assert message.SerializeToString(deterministic=True) == payload
    message.DiscardUnknownFields()  # type: ignore[attr-defined]
    assert message.SerializeToString(deterministic=True) == payload, "no field was dropped"


@pytest.mark.parametrize("name", [name for name, _ in CALLS])
def test_an_older_release_reads_the_calls_of_this_one(name: str) -> None:
    (kind,) = (type(one) for one in calls() if one.DESCRIPTOR.full_name == name)
    expected = message_factory.GetMessageClass(CONTRACT.message(name, b"").DESCRIPTOR)()
    fill(expected)
    sent = kind()
    fill(sent, known=expected.DESCRIPTOR)
    message = CONTRACT.message(name, sent.SerializeToString())
    message.DiscardUnknownFields()  # type: ignore[attr-defined]
    assert message == expected


def test_an_older_router_does_nothing_about_a_step_of_a_request_that_waits() -> None:
    cancel = router_pb2.Progress(
        request_id="a",
        state=router_pb2.PROGRESS_STATE_FAILED,
        failure_reason=router_pb2.FAILURE_REASON_CANCELLED,
    )
    steps = [router_pb2.Progress(request_id="a", priority=3), cancel]
    payload = router_pb2.ReportRequest(progress=steps).SerializeToString()
    older: Any = CONTRACT.message("kvroute.v1.ReportRequest", payload)
    # No reservation has an empty id (UNKNOWN); without a state a step is INVALID.
    assert [(one.reservation_id, one.state) for one in older.progress] == [("", 0), ("", 4)]


def test_steps_of_an_older_client_name_no_request_that_waits() -> None:
    (payload,) = [payload for name, payload in CALLS if name == "kvroute.v1.ReportRequest"]
    for step in router_pb2.ReportRequest.FromString(payload).progress:
        assert step.reservation_id
        assert not step.request_id
        assert not step.HasField("priority")
