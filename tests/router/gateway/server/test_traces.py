"""Spans of requests through the gateway: from the client's to the engine's."""

import pytest

from router.observe.tracing.traceparent import SpanContext
from tests.router.gateway.server.test_gateway import BODY, CHAT, WHOLE
from tests.stage.gateway import Worker, a_gateway, answering, streaming
from tests.stage.traces import PARENT, Kept

ROUTER = ["kvroute.hash", "kvroute.match", "kvroute.cost", "kvroute.reserve", "kvroute.route"]
UNSAMPLED = PARENT.header()[:-1] + "0"


@pytest.mark.parametrize("in_process", [False, True])
async def test_a_trace_goes_from_the_client_over_the_router_to_the_engine(in_process: bool) -> None:
    kept, worker = Kept(), Worker(answering(WHOLE))
    async with a_gateway(worker, tracing=kept.tracing, in_process=in_process) as stage:
        headers = {"traceparent": PARENT.header(), "X-Request-Id": "mine"}
        assert (await stage.ask(CHAT, BODY, headers=headers)).body == WHOLE
    tree = kept.tree()
    own = f"POST {CHAT}"
    above = dict.fromkeys(("kvroute.pick", "kvroute.first_token", "kvroute.forward"), own)
    above |= dict.fromkeys(ROUTER[:-1], "kvroute.route")
    above |= dict.fromkeys(("kvroute.route", "kvroute.render"), "kvroute.pick")
    assert tree == above | {own: ""}
    root, forward = kept.one(own), kept.one("kvroute.forward")
    assert root.parent_id == PARENT.span_id
    assert {span.context.trace_id for span in kept.spans} == {PARENT.trace_id}
    at_engine = SpanContext.read(worker.requests[0].headers["traceparent"])
    assert at_engine == forward.context
    assert root.attributes | forward.attributes == {
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "kvroute.cached_tokens": 16,
        "kvroute.outcome": "finished",
        "kvroute.request.id": "mine",
        "kvroute.worker.id": "w0",
        "server.address": worker.address,
    }
    route = kept.one("kvroute.route").attributes
    assert str(route["kvroute.request.id"]).startswith("mine~")
    assert route["kvroute.reservation.id"]
    assert root.began_s <= forward.began_s <= forward.ended_s <= root.ended_s
    assert not any(span.error for span in kept.spans)


async def test_the_first_token_of_a_stream_comes_before_its_end() -> None:
    kept = Kept(share=1.0)
    worker = Worker(streaming(b"data: a\n\n", b"data: [DONE]\n\n"))
    async with (
        a_gateway(worker, tracing=kept.tracing) as stage,
        stage.post(CHAT, BODY | {"stream": True}) as answer,
    ):
        await answer.read()
    first, pick, forward = (
        kept.one(f"kvroute.{name}") for name in ("first_token", "pick", "forward")
    )
    assert first.began_s == pick.ended_s
    assert first.ended_s <= forward.ended_s


async def test_the_histograms_name_the_trace_to_a_prometheus_that_reads_open_metrics() -> None:
    kept = Kept()
    async with a_gateway(Worker(answering(WHOLE)), tracing=kept.tracing) as stage:
        await stage.ask(CHAT, BODY, headers={"traceparent": PARENT.header()})
        headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
        answer = await stage.get("/metrics", headers=headers)
        text = answer.body.decode()
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        answer = await stage.get("/metrics")
        plain = answer.body.decode()
        assert answer.headers["Content-Type"].startswith("text/plain")
    exemplar = f'# {{trace_id="{PARENT.trace_id:032x}"}}'
    buckets = [line for line in text.splitlines() if line.startswith("kvroute_pick_seconds_bucket")]
    assert any(exemplar in line for line in buckets)
    assert "trace_id" not in plain


async def test_a_client_whose_span_is_not_sampled_has_no_spans_and_its_header_goes_on() -> None:
    kept, worker = Kept(share=1.0), Worker(answering(WHOLE))
    async with (
        a_gateway(worker, tracing=kept.tracing) as stage,
        stage.post(CHAT, BODY, headers={"traceparent": UNSAMPLED}) as answer,
    ):
        await answer.read()
    assert kept.spans == []
    assert worker.requests[0].headers["traceparent"] == UNSAMPLED


async def test_without_tracing_a_sampled_header_goes_on_as_it_came() -> None:
    worker = Worker(answering(WHOLE))
    async with (
        a_gateway(worker) as stage,
        stage.post(CHAT, BODY, headers={"traceparent": PARENT.header()}) as answer,
    ):
        await answer.read()
    assert worker.requests[0].headers["traceparent"] == PARENT.header()


async def test_a_refusal_and_a_dead_worker_are_errors_of_their_spans() -> None:
    kept = Kept(share=1.0)
    async with a_gateway(tracing=kept.tracing) as stage:
        assert (await stage.ask(CHAT, BODY)).status == 503
        assert kept.one("kvroute.pick").error == "NO_WORKER"
        assert kept.one(f"POST {CHAT}").error == "refused"
        kept.spans.clear()
        stage.add("dead", "http://127.0.0.1:1")
        assert (await stage.ask(CHAT, BODY)).status == 502
    assert "ClientConnectorError" in kept.one("kvroute.forward").error
    assert kept.one(f"POST {CHAT}").error == "failed"
