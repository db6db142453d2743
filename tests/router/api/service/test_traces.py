"""A router's spans of requests whose callers' spans are sampled, over real gRPC."""

import pytest

from indexer.kernel import NativeIndex
from router.config.settings.queue_settings import QueueSettings
from tests.stage.served import asked, refusal, served
from tests.stage.traces import PARENT, Kept

STAGES = ["kvroute.hash", "kvroute.match", "kvroute.cost", "kvroute.reserve"]
UNSAMPLED = PARENT.header()[:-1] + "0"


async def test_a_route_has_spans_of_its_stages_and_its_receipt_as_attributes() -> None:
    kept = Kept()
    async with served("w0", "w1", tracing=kept.tracing) as stage:
        answer = await stage.route(traceparent=PARENT.header())
    assert kept.names() == [*STAGES, "kvroute.route"]
    assert kept.tree() == dict.fromkeys(STAGES, "kvroute.route") | {"kvroute.route": ""}
    route = kept.one("kvroute.route")
    assert route.parent_id == PARENT.span_id
    assert {span.context.trace_id for span in kept.spans} == {PARENT.trace_id}
    ends = [route.began_s]
    for stage_name in STAGES:
        span = kept.one(stage_name)
        assert span.began_s == pytest.approx(ends[-1])
        ends.append(span.ended_s)
    assert ends == sorted(ends)
    assert route.ended_s == pytest.approx(ends[-1])
    about, receipt = route.attributes, answer.receipt
    assert about["kvroute.worker.id"] == answer.worker_id
    assert about["kvroute.policy"] == receipt.policy
    assert about["kvroute.prompt_tokens"] == 100
    assert about["kvroute.candidates"] == 2
    assert about["kvroute.cost"] == receipt.picked.cost
    assert about["kvroute.runner_up.id"] == receipt.runner_up.worker_id
    assert about["kvroute.term.load"] == receipt.picked.terms["load"]


async def test_the_receipt_is_in_the_span_where_the_answer_has_none() -> None:
    kept = Kept()
    async with served("w0", tracing=kept.tracing) as stage:
        answer = await stage.route(traceparent=PARENT.header(), omit_receipt=True)
    assert not answer.HasField("receipt")
    assert kept.one("kvroute.route").attributes["kvroute.policy"] == "dynamo-adaptive"


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED, "no traceparent"])
async def test_other_requests_have_no_span(traceparent: str) -> None:
    kept = Kept(share=1.0)
    async with served("w0", tracing=kept.tracing) as stage:
        await stage.route(traceparent=traceparent)
    assert kept.spans == []


async def test_tracing_stays_on_after_a_reload() -> None:
    kept = Kept()
    async with served("w0", tracing=kept.tracing, index=NativeIndex()) as stage:
        stage.fleet.core.reconfigure(stage.fleet.core.routing)
        await stage.route(traceparent=PARENT.header())
    assert "kvroute.route" in kept.names()


async def test_the_calls_own_traceparent_comes_before_the_messages() -> None:
    kept = Kept()
    call = PARENT.header().replace("b7ad6b7169203331", "1111111111111111")
    async with served("w0", tracing=kept.tracing) as stage:
        for metadata in (call, UNSAMPLED, "nonsense"):
            await stage.router.Route(
                asked(traceparent=PARENT.header()), metadata=[("traceparent", metadata)]
            )
    parents = [span.parent_id for span in kept.spans if span.name == "kvroute.route"]
    assert parents == [0x1111111111111111, PARENT.span_id, PARENT.span_id]


async def test_items_of_a_stream_have_spans_of_their_own() -> None:
    kept = Kept()
    async with served("w0", tracing=kept.tracing, index=NativeIndex()) as stage:
        call = await stage.stream(asked(), asked(traceparent=PARENT.header()))
        answered = 0
        while answered < 2:
            answered += len((await call.read()).results)
        await call.done_writing()
    assert kept.names() == [*STAGES, "kvroute.route"]


async def test_a_wait_is_a_span_and_ends_where_the_decision_begins() -> None:
    kept = Kept()
    async with served(queue=QueueSettings(), tracing=kept.tracing) as stage:
        stage.fleet.add("w0", total_slots=1)
        first = await stage.route()
        call = stage.route(traceparent=PARENT.header())
        await stage.waits(1)
        stage.fleet.now_s += 0.25
        await stage.report(first.reservation_id)
        await call
    queue, route = kept.one("kvroute.queue"), kept.one("kvroute.route")
    assert queue.ended_s - queue.began_s == pytest.approx(0.25)
    assert kept.one("kvroute.hash").began_s == pytest.approx(queue.ended_s)
    assert route.began_s == queue.began_s


async def test_refusals_and_callers_that_leave_end_their_spans() -> None:
    kept = Kept()
    async with served(queue=QueueSettings(), tracing=kept.tracing) as stage:
        await refusal(stage.route(traceparent=PARENT.header()))
        stage.fleet.add("w0", total_slots=1)
        await stage.route()
        call = stage.route(traceparent=PARENT.header())
        await stage.waits(1)
        call.cancel()
        await stage.waits(0)
    errors = [span.error for span in kept.spans if span.name == "kvroute.route"]
    assert errors == ["NO_WORKER", "CANCELLED"]


async def test_a_repeated_request_says_so() -> None:
    kept = Kept()
    async with served("w0", tracing=kept.tracing) as stage:
        for _ in range(2):
            await stage.route(traceparent=PARENT.header(), request_id="a")
    spans = [span for span in kept.spans if span.name == "kvroute.route"]
    assert [span.attributes.get("kvroute.repeated", False) for span in spans] == [False, True]
