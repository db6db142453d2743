"""Spans of requests for which Envoy asks."""

import grpc.aio
import pytest

from tests.stage.gateway import Worker, answering
from tests.stage.picker import (
    Stage,
    a_picker,
    picked,
    request_body,
    request_headers,
    response_headers,
)
from tests.stage.traces import PARENT, Kept
from tests.stage.waiting import until

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


async def served(stage: Stage, **headers: str) -> str:
    """The endpoint of a request that is answered."""
    call = await stage.sent(request_headers(CHAT, **headers), request_body(BODY))
    endpoint = picked(await call.read())
    await call.read()
    await call.write(response_headers(last=True, served=endpoint))
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    return endpoint


@pytest.mark.parametrize("in_process", [False, True])
async def test_the_routers_spans_are_below_the_pickers_and_that_below_the_gateways(
    in_process: bool,
) -> None:
    kept = Kept()
    async with a_picker(
        Worker(answering(b"{}")), tracing=kept.tracing, in_process=in_process
    ) as stage:
        endpoint = await served(stage, traceparent=PARENT.header())
        await until(lambda: "kvroute.picker" in kept.names(), "the request is over")
    tree = kept.tree()
    assert tree["kvroute.route"] == "kvroute.pick"
    assert tree["kvroute.pick"] == "kvroute.picker"
    own = kept.one("kvroute.picker")
    assert own.parent_id == PARENT.span_id
    assert own.attributes == {"kvroute.outcome": "finished", "kvroute.endpoint": endpoint}
    assert own.error == ""


async def test_a_share_of_the_requests_without_a_trace_begins_one() -> None:
    kept = Kept(share=1.0)
    async with a_picker(Worker(answering(b"{}")), tracing=kept.tracing) as stage:
        await served(stage)
        await until(lambda: "kvroute.picker" in kept.names(), "the request is over")
    assert kept.one("kvroute.picker").parent_id == 0


async def test_a_refusal_is_an_error() -> None:
    kept = Kept(share=1.0)
    async with a_picker(tracing=kept.tracing) as stage:
        call = await stage.sent(request_headers(CHAT), request_body(BODY))
        assert (await call.read()).HasField("immediate_response")
        await call.done_writing()
        await until(lambda: "kvroute.picker" in kept.names(), "the request is over")
    assert kept.one("kvroute.pick").error == "NO_WORKER"
    assert kept.one("kvroute.picker").error == "refused"
