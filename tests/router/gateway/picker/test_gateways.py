"""What each gateway sends and takes by default, as recorded scripts, against a picker's defaults.

The shapes are those of the gateways' own sources and documents of August 2026 (docs/envoy.md):
which modes they name, how headers come, whether answers are shown, what they read of an answer.
"""

import ipaddress

import pytest

from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.fleet.reservations.reservations import Ending
from tests.stage.gateway import Worker, answering
from tests.stage.picker import (
    Stage,
    a_picker,
    header_map,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.stage.waiting import until

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
JSON = b'{"usage":{"prompt_tokens":9,"completion_tokens":4}}'
ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"


def workers() -> list[Worker]:
    return [Worker(answering(b"{}")) for _ in range(2)]


def by_metadata(message: pb.ProcessingResponse) -> str:
    """The endpoint as Istio reads it."""
    return str(message.dynamic_metadata["envoy.lb"][ENDPOINT])


def by_header(common: pb.CommonResponse) -> str:
    """The endpoint as agentgateway and Envoy AI Gateway read it."""
    (value,) = (
        each.header.raw_value.decode()
        for each in common.header_mutation.set_headers
        if each.header.key == ENDPOINT
    )
    return value


def addresses(stage: Stage) -> set[str]:
    return {each.address.removeprefix("http://") for each in stage.picker.roster.workers}


async def answered(stage: Stage, call: object, served: str = "") -> None:
    """The answer passes in full duplex, and ends the request."""
    await call.write(response_headers(content_type="application/json", served=served))  # type: ignore[attr-defined]
    assert (await call.read()).HasField("response_headers")  # type: ignore[attr-defined]
    await call.write(response_body(JSON, last=True))  # type: ignore[attr-defined]
    echoed = (await call.read()).response_body.response.body_mutation.streamed_response  # type: ignore[attr-defined]
    assert echoed.body == JSON
    await stage.idle()
    assert stage.endings == {Ending.FINISHED: 1}


async def test_istio_reads_the_metadata_and_names_no_subset() -> None:
    """`envoy.lb` alone goes either way, so a subset never comes; the served endpoint does."""
    async with a_picker(*workers()) as stage:
        call = await stage.sent(request_headers(CHAT), request_body(BODY))
        picked = by_metadata(await call.read())
        assert picked in addresses(stage)
        await call.read()
        await answered(stage, call, served=picked)


async def test_agentgateway_parses_the_header_as_one_address() -> None:
    async with a_picker(*workers()) as stage:
        call = stage.call()
        first = request_headers(CHAT)
        hint = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({SUBSET: sorted(addresses(stage))})
        await call.write(first)
        await call.write(request_body(BODY))
        value = by_header((await call.read()).request_headers.response)
        host, _, port = value.rpartition(":")  # a list would be no address
        assert ipaddress.ip_address(host).is_loopback
        assert int(port) > 0
        await call.read()
        await answered(stage, call, served=value)


@pytest.mark.parametrize("buffered", [False, True])
async def test_envoy_ai_gateway_takes_the_header_and_never_says_what_served(
    *, buffered: bool
) -> None:
    """ORIGINAL_DST: the header is the address. With its annotation, bodies come whole both ways.
    Its TLS is in test_connection.py, and with a real Envoy in tests/envoy."""
    async with a_picker(*workers()) as stage:
        call = stage.call()
        first = request_headers(CHAT)
        if buffered:
            first.protocol_config.request_body_mode = pb.BODY_SEND_MODE_BUFFERED
            first.protocol_config.response_body_mode = pb.BODY_SEND_MODE_BUFFERED
        await call.write(first)
        if buffered:
            assert (await call.read()).HasField("request_headers")
        await call.write(request_body(BODY))
        message = await call.read()
        kind = message.request_body if buffered else message.request_headers
        assert by_header(kind.response) in addresses(stage)
        if not buffered:
            await call.read()
            await answered(stage, call)
            return
        await call.write(response_headers(content_type="application/json"))
        assert (await call.read()).HasField("response_headers")
        await call.write(response_body(JSON, last=True))
        passed = (await call.read()).response_body
        assert not passed.response.HasField("body_mutation")  # it passes as it is
        await stage.idle()
        assert stage.endings == {Ending.FINISHED: 1}


async def as_nginx(stage: Stage) -> None:
    """Headers as `value`, no modes, then its side is closed, and it reads to the end."""
    call = stage.call()
    named = header_map({})
    for name, value in ((":method", "POST"), (":path", CHAT)):
        named.headers.add(key=name, value=value)
    await call.write(pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=named)))
    await call.write(request_body(BODY))
    await call.done_writing()
    messages = [message async for message in call]
    assert by_header(messages[0].request_headers.response) in addresses(stage)


async def test_an_answer_that_is_not_shown_ends_by_the_load_of_its_engine() -> None:
    async with a_picker(*workers(), unobserved_s=3600.0) as stage:
        await as_nginx(stage)
        fleet = stage.served.fleet
        await until(lambda: len(fleet.core.unobserved) == 1, "the router sees nothing")
        (worker,) = fleet.loads()
        fleet.turn(1)  # the sample is older than what it lacks
        fleet.now_s += 1.0
        fleet.say(worker, running=1)
        assert stage.open == 1
        fleet.now_s += 1.0
        fleet.say(worker, running=0)
        assert stage.endings == {Ending.FINISHED: 1}
        await stage.counted("kvroute_picker_requests_total", outcome="unobserved")


async def test_nginx_sends_a_whole_body_and_shows_no_answer() -> None:
    async with a_picker(*workers(), unobserved_s=0.05) as stage:
        await as_nginx(stage)
        await stage.idle()
        await until(lambda: stage.endings == {Ending.FINISHED: 1}, "it is no longer counted")
        await stage.counted("kvroute_picker_requests_total", outcome="unobserved")
