"""Every field of RouteResponse, and of the messages in it, is set by some answer to plain, paired
and waiting requests; traced and repeated ones have the same."""

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from events.engines.numbers import GAUGES
from indexer.identity import Tier, WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk.answers import Waiting
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.api.service.calls import Guard
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.routing_settings import GuardSettings
from router.decide.core.progress import Progress, ProgressState
from router.fleet.token_times import TokenTime
from router.observe.tracing.spans import Span, Tracing
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked, desk_of

NUMBERS = dict.fromkeys(GAUGES, 0.5)
ELSEWHERE = {
    "RouteResponse.prompt": "a text's tokens, by router/api/service/texts.py",
    "CandidateRow.excluded": "of a worker that can't be picked: rows of Explanation alone",
}
"""Fields that no answer of the desk has, and whose they are."""


class Stage:
    """A desk, and the fields that its answers had."""

    def __init__(self, tracing: Tracing | None = None, **routing: Any) -> None:
        self.fleet = Fleet(index=NativeIndex(), **routing)
        metrics = Metrics(CollectorRegistry())
        guard = Guard.of(1 << 20, metrics)
        about: dict[str, Any] = {"queue": QueueSettings(), "tracing": tracing}
        self.desk: Desk = desk_of(self.fleet, metrics, guard.fault, **about)

    def answer(self, tokens: int, **about: Any) -> router_pb2.RouteResponse:
        answered = self.desk.route(asked(tokens, **about).SerializeToString())
        assert not isinstance(answered, Waiting)
        return router_pb2.RouteResponse.FromString(answered[0])


def fields_of(message: Descriptor, seen: set[str] | None = None) -> Iterator[FieldDescriptor]:
    """All fields of a message, and of the messages in it; entries of maps left out."""
    seen = set() if seen is None else seen
    if message.full_name in seen or message.GetOptions().map_entry:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def set_in(message: Message) -> Iterator[str]:
    """The fields that a message and the messages in it have."""
    for field, value in message.ListFields():
        yield name_of(field)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for one in value if field.is_repeated else (value,):
            yield from set_in(one)


def name_of(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


def plain() -> Iterator[router_pb2.RouteResponse]:
    """Ranks with labels and priorities, blocks on every tier and predicted ones, a drained worker,
    a guard that moves the pick, and a policy whose costs have terms that all rows share."""
    policies = ("dynamo-adaptive", "dynamo-unguarded", "dynamo-blocks", "ttft", "conductor")
    for policy in policies:
        stage = Stage(policy=policy, alternatives=2, guard=GuardSettings(policies=policies))
        about = {"labels": {"zone": "a"}, "multi_rank": True, "priority_scheduling": "lower"}
        numbers = {"total_blocks": 40_000, "total_slots": 256, "waiting": 1, "numbers": NUMBERS}
        line = TokenTime(0.01, 1e-3, 1e-6)
        stage.fleet.core.fleet.token_times.of = lambda *_, line=line: line  # type: ignore[misc]
        keys = [stage.fleet.add(f"w{i}", 1, **about, **numbers) for i in range(4)]
        for key, tier, tokens in zip(keys, Tier, (4096, 4112, 4128), strict=False):
            stage.fleet.cache(key, prompt(5000), 1024, Tier.DEVICE)
            stage.fleet.cache(key, prompt(5000), tokens, tier)
        stage.fleet.say(keys[0], running=12, used_blocks=900.0, sampled_at_s=stage.fleet.now_s)
        stage.fleet.core.drain("w3")
        stage.fleet.now_s += 0.5
        for number in range(6):
            yield stage.answer(4200 + 16 * number, request_id=f"r{number}", priority=3)


def paired() -> Iterator[router_pb2.RouteResponse]:
    """By SGLang's bootstrap server, and by vLLM's parameters."""
    for engine, about in (
        ("sglang", {"bootstrap_host": "ib0"}),
        ("vllm", {"kv_connector": "MooncakeConnector", "kv_engine_id": "e7"}),
    ):
        stage = Stage()
        labels = {"labels": {"host": "h"}, "multi_rank": True}
        first = stage.fleet.add("p", 1, role="prefill", engine=engine, **labels, **about)
        stage.fleet.add("d", role="decode", engine=engine, **labels)
        stage.fleet.cache(first, prompt(800), 320)
        yield stage.answer(1600, phase=router_pb2.PHASE_PREFILL_DECODE)


def waited() -> router_pb2.RouteResponse:
    """Behind another one that waits."""
    stage = Stage()
    key = stage.fleet.add("w0", total_slots=1)
    held = stage.answer(40)
    waiting = [
        stage.desk.route(asked(40, request_id=f"w{n}").SerializeToString()) for n in range(2)
    ]
    for _ in waiting:
        stage.fleet.now_s += 0.25
        ended = Progress(held.reservation_id, ProgressState.FINISHED)
        stage.fleet.core.report(ended, stage.fleet.now_s)
        stage.fleet.say(key)
        stage.desk.changed()
        held = next(
            router_pb2.RouteResponse.FromString(one.take()[0])
            for one in reversed(waiting)
            if isinstance(one, Waiting) and one.outcome is not None
        )
    return held


def test_every_field_of_an_answer_is_set_by_some_request() -> None:
    seen: set[str] = set()
    for answer in (*plain(), *paired(), waited()):
        seen.update(set_in(answer))
    fields = {name_of(field) for field in fields_of(router_pb2.RouteResponse.DESCRIPTOR)}
    assert fields - seen == {
        *ELSEWHERE,
        *(name for name in fields if name.startswith("PromptTokens.")),
    }


def test_a_traced_request_has_the_fields_of_a_plain_one() -> None:
    spans: list[Span] = []
    traced, plain = Stage(Tracing(spans.append, 1.0, random.Random(7))), Stage()
    for stage in (traced, plain):
        stage.fleet.add("w0", labels={"zone": "a"})
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert traced.answer(100, traceparent=parent) == plain.answer(100, traceparent=parent)
    assert any(span.name == "kvroute.route" for span in spans)


def test_a_repeated_request_gets_every_field_again() -> None:
    stage = Stage()
    stage.fleet.add("w0", labels={"zone": "a"})
    first = stage.answer(100, request_id="again")
    assert first.receipt.picked.worker_id == "w0"
    stage.fleet.say(WorkerKey("w0", 0), running=3)
    assert stage.answer(100, request_id="again") == first
