"""The picker's port, called by grpc's own client as Envoy would."""

import asyncio
from collections import Counter
from threading import Event, Thread, current_thread
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvroute.client import KvRouteClient, RoutedRequest
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from kvroute.v1 import ListWorkersRequest
from router.api.desk.answers import Later
from router.fleet.reservations.reservations import Ending
from router.gateway.exchange import Exchange
from router.gateway.picker.calls import PROCESS
from router.gateway.picker.picks import PickedRequest
from router.gateway.server.long_bodies import LONG_BYTES
from router.gateway.server.roster import Roster
from tests.stage.garbage import freed_at_once
from tests.stage.gateway import Worker, answering
from tests.stage.picker import (
    Stage,
    a_picker,
    picked,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.stage.served import refusal
from tests.stage.waiting import DEADLINE_S, free_port, until

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\ndata: [DONE]\n\n'
)


def worker() -> Worker:
    return Worker(answering(b"{}"))


async def asked(stage: Stage, body: bytes = BODY, **headers: str) -> tuple[object, str]:
    """A stream whose request is picked for, and the endpoint."""
    call = await stage.sent(request_headers(CHAT, **headers), request_body(body))
    endpoint = picked(await call.read())
    echoed = (await call.read()).request_body.response.body_mutation.streamed_response
    assert (echoed.body, echoed.end_of_stream) == (body, True)
    return call, endpoint


async def test_a_stream_of_events_is_passed_on_as_it_came() -> None:
    one, two = worker(), worker()
    async with a_picker(one, two) as stage:
        call, endpoint = await asked(stage)
        assert endpoint in {each.address.removeprefix("http://") for each in (one, two)}
        assert stage.open == 1
        await call.write(response_headers(served=endpoint))
        assert (await call.read()).WhichOneof("response") == "response_headers"
        chunks = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', USAGE]
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            await call.write(response_body(chunk, last=last))
            echo = (await call.read()).response_body.response.body_mutation.streamed_response
            assert (echo.body, echo.end_of_stream) == (chunk, last)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await stage.idle()
        assert stage.endings == {Ending.FINISHED: 1}
        await stage.counted("kvroute_picker_requests_total", outcome="finished")
        assert stage.sample("kvroute_open_requests", program="picker") == 0


async def test_a_client_that_leaves_leaves_no_reservation(stage: Stage) -> None:
    call, _ = await asked(stage)
    assert stage.open == 1
    call.cancel()
    await stage.idle()
    assert stage.endings == {Ending.FAILED_CANCELLED: 1}
    await stage.counted("kvroute_picker_requests_total", outcome="cancelled")


@pytest.mark.parametrize(
    ("status", "outcome"), [(503, "failed"), (429, "failed"), (400, "worker_refused")]
)
async def test_an_error_of_the_worker_is_reported(status: int, outcome: str, stage: Stage) -> None:
    call, _ = await asked(stage)
    await call.write(response_headers(status, "application/json"))
    await call.read()
    await call.write(response_body(b'{"error":{}}', last=True))
    await call.read()
    await call.done_writing()
    await stage.idle()
    await stage.counted("kvroute_picker_requests_total", outcome=outcome)
    assert sum(stage.endings.values()) == 1


async def test_a_refusal_is_an_answer_of_http(empty: Stage) -> None:
    call = await empty.sent(request_headers(CHAT), request_body(BODY))
    refused = (await call.read()).immediate_response
    assert refused.status.code == 503
    headers = {
        each.header.key: each.header.raw_value.decode() for each in refused.headers.set_headers
    }
    assert (headers["x-kvroute-reason"], headers["retry-after"]) == ("NO_WORKER", "1")
    assert b'"code":"NO_WORKER"' in refused.body
    assert await call.read() is grpc.aio.EOF
    assert empty.sample("kvroute_refusals_total", program="picker", reason="NO_WORKER") == 1


@pytest.mark.parametrize("in_process", [False, True])
async def test_a_request_of_a_gateway_that_reads_no_answers_is_decided_and_reserves_nothing(
    in_process: bool,
) -> None:
    bodies = {"observed": BODY, "blind": b"no JSON"}
    async with a_picker(worker(), in_process=in_process) as stage:
        for outcome, body in bodies.items():
            call = stage.call()
            for message in (request_headers(CHAT), request_body(body)):
                message.observability_mode = True
                await call.write(message)
            assert await call.read() is grpc.aio.EOF  # and nothing before it
            await stage.counted("kvroute_picker_requests_total", outcome=outcome)
        observed = stage.served.fleet.core.fleet.observed
        assert {key.worker_id: each.picks for key, each in observed.workers.items()} == {"w0": 1}
        assert (stage.open, stage.endings) == (0, {})
        assert stage.sample("kvroute_by_load_total", program="picker", reason="fault") == 0


async def test_an_observed_stream_that_ends_before_the_decision_is_cancelled(stage: Stage) -> None:
    call = stage.call()
    message = request_headers(CHAT)
    message.observability_mode = True
    await call.write(message)
    await stage.until_open(1)
    call.cancel()
    await stage.counted("kvroute_picker_requests_total", outcome="cancelled")
    assert stage.served.fleet.core.fleet.observed.picks == 0


async def test_a_request_that_is_observed_and_fits_no_worker_is_counted_as_refused(
    empty: Stage,
) -> None:
    call = empty.call()
    for message in (request_headers(CHAT), request_body(BODY)):
        message.observability_mode = True
        await call.write(message)
    assert await call.read() is grpc.aio.EOF
    await empty.counted("kvroute_picker_requests_total", outcome="refused")
    assert empty.sample("kvroute_refusals_total", program="picker", reason="NO_WORKER") == 1


async def test_a_get_goes_by_load_and_reserves_nothing(stage: Stage) -> None:
    call = await stage.sent(request_headers("/v1/models", last=True))
    assert picked(await call.read())
    assert stage.open == 0
    await call.write(response_headers(content_type="application/json", last=True))
    await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert stage.sample("kvroute_by_load_total", program="picker", reason="unknown_path") == 1
    await stage.counted("kvroute_picker_requests_total", outcome="blind")


async def test_a_long_body_comes_back_in_parts_that_every_gateway_takes(stage: Stage) -> None:
    long = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 300_000 + b'"}]}'
    call = await stage.sent(request_headers(CHAT), request_body(long))
    picked(await call.read())
    back = b""
    while True:
        part = (await call.read()).request_body.response.body_mutation.streamed_response
        assert len(part.body) <= 62_000
        back += part.body
        if part.end_of_stream:
            break
    assert back == long
    call.cancel()
    await stage.idle()


LONG = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * LONG_BYTES + b'"}]}'


async def back(call: Any) -> bytes:
    """The request's body, as it comes back."""
    body, ended = b"", False
    async with asyncio.timeout(DEADLINE_S):
        while not ended:
            part = (await call.read()).request_body.response.body_mutation.streamed_response
            body, ended = body + part.body, part.end_of_stream
    return body


class Read:
    """What bodies were made of: in which thread, once the test lets them."""

    def __init__(self) -> None:
        self.threads: list[Thread] = []
        self.may = Event()
        self.may.set()

    def __call__(self, *about: Any, **more: Any) -> Exchange:
        self.threads.append(current_thread())
        assert self.may.wait(DEADLINE_S)
        return Exchange(*about, **more)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    seen = Read()
    monkeypatch.setattr("router.gateway.picker.request_stream.Exchange", seen)
    return seen


async def test_a_long_body_is_read_beside_the_loop_and_a_short_one_in_it(
    read: Read, stage: Stage
) -> None:
    call, _ = await asked(stage)
    assert read.threads == [current_thread()]
    for parts in ((LONG,), (LONG[:9], LONG[9:-1], LONG[-1:])):
        call = await stage.sent(request_headers(CHAT))
        for part in parts:
            await call.write(request_body(part, last=part is parts[-1]))
        assert picked(await call.read())
        assert read.threads.pop() is not current_thread()
        assert await back(call) == LONG
    assert stage.sample("kvroute_held_bytes", what="picker_bodies", port="") == 0


async def test_a_stream_that_ends_while_its_body_is_read_leaves_nothing(
    read: Read, stage: Stage
) -> None:
    read.may.clear()
    call = await stage.sent(request_headers(CHAT), request_body(LONG))
    await until(lambda: read.threads, "the body is being read")
    call.cancel()
    await stage.counted("kvroute_picker_requests_total", outcome="cancelled")
    assert stage.sample("kvroute_held_bytes", what="picker_bodies", port="") == 0
    read.may.set()
    call, _ = await asked(stage)
    assert stage.open == 1
    call.cancel()
    await stage.idle()
    assert stage.endings == {Ending.FAILED_CANCELLED: 1}


async def test_a_body_over_the_bound_flows_through_while_the_rest_of_it_comes() -> None:
    body = b"".join(b"%07d\n" % number for number in range(1 << 20))
    async with a_picker(worker(), body_mib_max=1) as stage:
        call = stage.call()

        async def send() -> None:
            await call.write(request_headers(CHAT))
            for at in range(0, len(body), 60_000):
                await call.write(request_body(body[at : at + 60_000], last=at + 60_000 > len(body)))

        sending = asyncio.create_task(send())
        assert picked(await call.read())
        assert await back(call) == body
        await sending
        assert stage.sample("kvroute_by_load_total", program="picker", reason="body_too_large") == 1


async def reserved(stage: Stage) -> dict[str, int]:
    """Reservations by worker."""
    listed = await stage.served.workers.ListWorkers(ListWorkersRequest())
    return {each.worker_id: each.reserved for each in listed.workers}


async def test_another_endpoint_than_the_picked_one_gets_the_load() -> None:
    one, two = worker(), worker()
    async with a_picker(one, two) as stage:
        call, endpoint = await asked(stage)
        addresses = {each.address.removeprefix("http://"): each for each in (one, two)}
        (other,) = set(addresses) - {endpoint}
        await call.write(response_headers(served=other))
        await call.read()
        number = 0 if addresses[other] is one else 1
        moved = {"w0": 0, "w1": 0} | {f"w{number}": 1}
        async with asyncio.timeout(60):
            while await reserved(stage) != moved:
                pass
        assert stage.sample("kvroute_picker_not_followed_total", endpoint="known") == 1
        call.cancel()
        await stage.idle()


@pytest.mark.parametrize("is_whole", [False, True])
async def test_what_comes_of_an_answer_while_the_load_moves_is_reported(
    monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    async with a_picker(worker(), worker()) as stage:
        call, endpoint = await asked(stage)
        picker = stage.picker._picker
        assert picker is not None
        routed, seen = picker.asking.routed, asyncio.Event()

        async def later(*about: Any, **more: Any) -> RoutedRequest:
            await seen.wait()
            return await routed(*about, **more)

        monkeypatch.setattr(picker.asking, "routed", later)
        addresses = [each.address.removeprefix("http://") for each in stage.workers]
        addresses.remove(endpoint)
        await call.write(response_headers(served=addresses[0]))
        event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        await call.write(response_body(event + USAGE if is_whole else event, last=is_whole))
        for _ in range(2):
            await call.read()
        core = stage.served.fleet.core
        measured: list[object] = []
        monkeypatch.setattr(core.life, "_measure", lambda *about: measured.append(about))
        seen.set()
        moved = core.reservations._open
        await until(
            lambda: (
                any(each.prefill_done for each in moved.values()) or core.endings[Ending.FINISHED]
            ),
            "the new reservation has its first token, or its end",
        )
        assert measured == [], "the time since the move is not the worker's"
        call.cancel()
        await stage.idle()
        ends = [Ending.FAILED_CANCELLED, Ending.FINISHED if is_whole else Ending.FAILED_CANCELLED]
        assert stage.endings == Counter(ends)


async def test_a_models_rewritten_name_has_any_bytes(stage: Stage) -> None:
    """Such as no model's name has: the router decides."""
    stage.served.fleet.add("w1", address="http://10.0.0.1:1", model="\xff")
    first = request_headers(CHAT)
    headers = first.request_headers.headers.headers
    headers.add(key="x-gateway-model-name-rewrite", raw_value=b"\xff")
    call = await stage.sent(first, request_body(BODY))
    assert picked(await call.read()) == "10.0.0.1:1"
    assert stage.sample("kvroute_by_load_total", program="picker", reason="fault") == 0
    call.cancel()
    await stage.idle()


async def test_a_gateways_subset_bounds_the_pick() -> None:
    one, two = worker(), worker()
    async with a_picker(one, two) as stage:
        only = two.address.removeprefix("http://")
        for _ in range(4):
            call = stage.call()
            first = request_headers(CHAT)
            hint = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": [only]})
            await call.write(first)
            await call.write(request_body(BODY))
            assert picked(await call.read()) == only
        for subset in ("", "10.9.9.9:1"):
            call = stage.call()
            first = request_headers(CHAT)
            hint = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": subset})
            await call.write(first)
            await call.write(request_body(BODY))
            assert (await call.read()).immediate_response.status.code == 503


async def test_a_body_that_is_no_json_goes_to_an_engine_that_says_so(stage: Stage) -> None:
    call = await stage.sent(request_headers(CHAT), request_body(b"no json"))
    assert picked(await call.read())
    assert stage.sample("kvroute_by_load_total", program="picker", reason="invalid_body") == 1
    call.cancel()


async def test_a_message_that_is_none_ends_the_stream(stage: Stage) -> None:
    call = stage.channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=bytes,
        response_deserializer=pb.ProcessingResponse.FromString,
    )()
    await call.write(b"\xff\xff\xff")
    assert (await refusal(call.read())).code is grpc.StatusCode.INVALID_ARGUMENT
    assert stage.sample("kvroute_open_requests", program="picker") == 0


async def test_unknown_methods_are_unimplemented(stage: Stage) -> None:
    call = stage.channel.unary_unary("/kvroute.v1.Router/Route")
    assert (await refusal(call(b""))).code is grpc.StatusCode.UNIMPLEMENTED


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(stage: Stage, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return (await health_pb2_grpc.HealthStub(stage.channel).Check(request)).status


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_call_of_health_without_a_message_ends(method: str, stage: Stage) -> None:
    call = stage.channel.stream_unary(f"/grpc.health.v1.Health/{method}")(iter(()))
    assert (await refusal(call)).code == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_refused(compression: grpc.Compression, stage: Stage) -> None:
    call = stage.channel.stream_stream(PROCESS)(compression=compression)
    assert await call.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_health_by_all_names_that_gateways_ask_for(stage: Stage) -> None:
    names = ("", "readiness", "inference-extension", "liveness")
    for name in (*names, "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert await health(stage, name) == SERVING
    assert (await refusal(health(stage, "nobody"))).code is grpc.StatusCode.NOT_FOUND


async def test_a_picker_without_workers_is_alive_and_not_ready(empty: Stage) -> None:
    assert await health(empty, "liveness") == SERVING
    assert await health(empty, "readiness") == NOT_SERVING
    watch = health_pb2_grpc.HealthStub(empty.channel).Watch(
        health_pb2.HealthCheckRequest(service="readiness")
    )
    assert (await watch.read()).status == NOT_SERVING
    one = worker()
    async with one.run():
        empty.served.fleet.add("w0", address=one.address)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_a_router_that_does_not_answer_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvroute.gateway")
    async with KvRouteClient(f"127.0.0.1:{free_port()}", timeout_s=0.2) as client:
        roster = Roster(client, lambda: 0.0)
        await roster.refresh()
        await roster.refresh()
        assert not roster.ready
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "can't be listed" in caplog.text


async def test_a_stop_waits_for_the_answers_under_way(stage: Stage) -> None:
    call, _ = await asked(stage)
    stopping = asyncio.create_task(stage.picker.stop())
    await until(lambda: not stage.picker.ready, "health says so")
    await call.write(response_headers())
    await call.read()
    await call.write(response_body(USAGE, last=True))
    assert (await call.read()).response_body.response.body_mutation.streamed_response.body
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await stopping
    await stage.idle()
    assert stage.endings == {Ending.FINISHED: 1}


async def test_a_request_that_is_over_is_freed() -> None:
    async with a_picker(worker()) as stage, freed_at_once(PickedRequest, RoutedRequest, Later):
        for _ in range(3):
            call, _ = await asked(stage)
            await call.write(response_headers(200, "application/json"))
            await call.read()
            await call.write(response_body(b"{}", last=True))
            await call.read()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        await stage.idle()
