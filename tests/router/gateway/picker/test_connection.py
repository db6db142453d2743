"""The picker's port: TLS and plain, connections that say nothing, bytes that are no HTTP/2."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.config.keys import ConfigError
from router.net.http2 import port
from router.net.http2.frames import PING, PREFACE, SETTINGS, frame
from router.net.keys.certificates import Certificates
from router.net.listener.http_bounds import HttpBounds
from tests.stage.certificates import Authority, written
from tests.stage.gateway import Worker, answering
from tests.stage.picker import Stage, a_picker, request_headers
from tests.stage.served import refusal
from tests.stage.tcp import exchanged
from tests.stage.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


def worker() -> Worker:
    return Worker(answering(b"{}"))


async def status(channel: grpc.aio.Channel) -> int:
    async with channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


def trusting(
    stage: Stage, authority: Authority, pair: tuple[bytes, bytes] | None = None
) -> grpc.aio.Channel:
    certificate, key = pair if pair is not None else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    return grpc.aio.secure_channel(f"127.0.0.1:{stage.picker.port}", credentials)


def plain(stage: Stage) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{stage.picker.port}")


async def test_tls_and_plain_come_to_one_port(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates(written(tmp_path, authority.issue()))
    async with a_picker(worker(), certificates=certificates) as stage:
        assert await status(trusting(stage, authority)) == SERVING
        assert await status(plain(stage)) == SERVING
        assert stage.sample("kvroute_picker_connections_total", kind="tls") == 1
        assert stage.sample("kvroute_picker_connections_total", kind="plain") >= 1


async def test_plain_connections_may_be_refused(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates(written(tmp_path, authority.issue()))
    async with a_picker(worker(), certificates=certificates, tls="server") as stage:
        assert await status(trusting(stage, authority)) == SERVING
        assert (await refusal(status(plain(stage)))).code is grpc.StatusCode.UNAVAILABLE
        assert stage.sample("kvroute_picker_connections_total", kind="refused") >= 1


async def test_certificates_of_callers_may_be_asked_for(tmp_path: Path) -> None:
    authority, stranger = Authority(), Authority("stranger")
    certificates = Certificates(written(tmp_path, authority.issue(), authority))
    async with a_picker(worker(), certificates=certificates, tls="mutual") as stage:
        assert await status(trusting(stage, authority, authority.issue("envoy"))) == SERVING
        for pair in (None, stranger.issue("envoy")):
            assert (
                await refusal(status(trusting(stage, authority, pair)))
            ).code is grpc.StatusCode.UNAVAILABLE


async def test_tls_without_a_certificate_is_refused_and_nobody_else(stage: Stage) -> None:
    await refusal(status(trusting(stage, Authority())))
    assert await status(plain(stage)) == SERVING


@pytest.mark.parametrize("tls", ["server", "mutual"])
async def test_tls_needs_its_files(tls: str) -> None:
    with pytest.raises(ConfigError, match=r"tls\.c"):
        async with a_picker(worker(), tls=tls):
            pass


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"])
async def test_what_is_no_http2_is_closed(sent: bytes, stage: Stage) -> None:
    assert b"HTTP/1" not in await exchanged(stage.picker.port, sent)
    assert await status(plain(stage)) == SERVING


async def test_a_connection_that_says_nothing_is_closed_and_counted() -> None:
    async with a_picker(worker(), http=HttpBounds(head_timeout_s=0.05)) as stage:
        assert await exchanged(stage.picker.port) == b""
        assert stage.picker.connections.closed["slow_head"] == 1


async def test_silent_connections_make_room_for_others() -> None:
    async with a_picker(worker(), http=HttpBounds(connections_max=3)) as stage:
        opened = [await asyncio.open_connection("127.0.0.1", stage.picker.port) for _ in range(6)]
        for reader, _ in opened[:3]:
            assert await reader.read() == b""
        assert await status(plain(stage)) == SERVING
        assert stage.picker.connections.open <= 3
        for _, writer in opened:
            writer.close()


async def test_a_silent_gateway_is_pinged_and_one_that_is_gone_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "LOOK_S", 0.01)
    monkeypatch.setattr(port, "KEEPALIVE_TIMEOUT_S", 0.05)
    async with a_picker(worker(), keepalive_s=0.05) as stage:
        last = await exchanged(stage.picker.port, PREFACE, frame(SETTINGS, 0, 0))
        assert frame(PING, 0, 0, bytes(8)) in last
        assert stage.picker.connections.closed["keepalive"] == 1
        assert await status(plain(stage)) == SERVING


async def test_an_old_connection_is_left_by_its_gateway_and_its_requests_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "LOOK_S", 0.01)
    monkeypatch.setattr(port, "FAREWELL_S", 0.05)
    async with a_picker(worker(), connection_age_s=0.05) as stage:
        call = await stage.sent(request_headers("/v1/chat/completions"))
        await stage.until_open(1)
        for _ in range(20):
            assert await status(plain(stage)) == SERVING
        assert stage.sample("kvroute_open_requests", program="picker") == 1, "its request goes on"
        call.cancel()
        await until(lambda: stage.picker.connections.open == 0, "old connections are closed")
        assert stage.picker.connections.closed["age"] == 0


async def test_a_connection_that_breaks_ends_its_requests(stage: Stage) -> None:
    calls = [stage.call() for _ in range(5)]
    for call in calls:
        await call.write(request_headers("/v1/chat/completions"))
    await stage.until_open(5)
    await stage.channel.close()
    await stage.until_open(0)
    assert stage.sample("kvroute_picker_requests_total", outcome="cancelled") == 5
