"""Rows of the README's table, each through a real Envoy: trailers, lists, TLS, long bodies."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.fleet.reservations.reservations import Ending
from router.gateway.picker.messages import ENDPOINT
from router.net.keys.certificates import Certificates
from tests.envoy.stage import Envoy, an_envoy
from tests.stage.certificates import Authority, written
from tests.stage.gateway import Worker
from tests.stage.tcp import tcp_server
from tests.stage.waiting import free_port, until

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
ROUNDS = 1_000
Config = dict[str, Any]
_HTTP = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


async def _play(request: web.Request, body: bytes) -> web.StreamResponse:
    """The body's digest, as an answer with usage."""
    digest = hashlib.sha256(body).hexdigest()
    content = {"digest": digest, "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
    return web.json_response(content)


def workers(count: int) -> list[Worker]:
    return [Worker(_play) for _ in range(count)]


async def whole(envoy: Envoy, size: int = 100) -> None:
    """One request of so many bytes, which its worker got as they are."""
    content = json.dumps(BODY | {"messages": [{"role": "user", "content": "x" * size}]}).encode()
    headers = {"Content-Type": "application/json"}
    async with envoy.post(io.BytesIO(content), headers=headers) as answer:
        assert answer.status == 200
        assert (await answer.json())["digest"] == hashlib.sha256(content).hexdigest()


def _cluster(config: Config, name: str) -> Any:
    (found,) = (each for each in config["static_resources"]["clusters"] if each["name"] == name)
    return found


def _manager(config: Config) -> Any:
    return config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0][
        "typed_config"
    ]


def with_trailers(config: Config) -> None:
    """Trailers of HTTP/1.1 both ways, which Envoy drops by default; without retries, since Envoy
    sends the body of a request with trailers twice where its route has a retry policy."""
    (host,) = _manager(config)["route_config"]["virtual_hosts"]
    del host["routes"][0]["route"]["retry_policy"]
    options = {"enable_trailers": True}
    _manager(config)["http_protocol_options"] = options
    explicit = {"@type": _HTTP, "explicit_http_config": {"http_protocol_options": options}}
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    _cluster(config, "fleet")["typed_extension_protocol_options"] = {name: explicit}


def observing(config: Config) -> None:
    """The picker only looks on: Envoy balances by itself."""
    for each in _manager(config)["http_filters"]:
        if each["name"] == "envoy.filters.http.ext_proc":
            each["typed_config"] |= {
                "observability_mode": True,
                "processing_mode": {
                    "request_body_mode": "STREAMED",
                    "response_header_mode": "SKIP",
                },
            }


def by_header(config: Config) -> None:
    """As Envoy AI Gateway has it: the endpoint's header is the connection's address."""
    fleet = _cluster(config, "fleet")
    for key in ("load_assignment", "load_balancing_policy"):
        del fleet[key]
    fleet["type"], fleet["lb_policy"] = "ORIGINAL_DST", "CLUSTER_PROVIDED"
    fleet["original_dst_lb_config"] = {"use_http_header": True, "http_header_name": ENDPOINT}


def over_tls(config: Config) -> None:
    """TLS to the picker that nobody verifies, as gateways have it."""
    context = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    _cluster(config, "kvroute")["transport_socket"] = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {"@type": context, "common_tls_context": {"alpn_protocols": ["h2"]}},
    }


class Trailing(Worker):
    """An engine that reads a chunked request with trailers, and answers so."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with tcp_server(self._serve) as port:
            self.address = f"http://127.0.0.1:{port}"
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                body, trailers = await chunked(reader)
                self.bodies.append(body)
                said = trailers.get("x-sum", "none")
                head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                for part in (b"data: {}\n\n", b"data: [DONE]\n\n"):
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                writer.write(f"0\r\nx-seen: {said}\r\n\r\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # Envoy has closed the connection
        finally:
            writer.close()


class Gone(Worker):
    """An engine whose port is closed."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        self.address = f"http://127.0.0.1:{free_port()}"
        yield


async def chunked(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, str]]:
    """A chunked body and its trailers."""
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    trailers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        trailers[name.lower()] = value.strip()
    return bytes(body), trailers


async def test_a_thousand_requests_with_trailers(tmp_path: Path) -> None:
    one = Trailing(_play)
    async with an_envoy(tmp_path, one, changes=with_trailers) as envoy:
        host, _, port = envoy.base.removeprefix("http://").rpartition(":")

        async def client(numbers: range) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            for number in numbers:
                content = json.dumps(BODY | {"user": f"{number}"}).encode()
                head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTrailer: x-sum\r\n"
                writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                writer.write(
                    b"%x\r\n%b\r\n0\r\nx-sum: %d\r\n\r\n" % (len(content), content, number)
                )
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                body, trailers = await chunked(reader)
                assert body == b"data: {}\n\ndata: [DONE]\n\n"
                assert trailers["x-seen"] == str(number)
            writer.close()

        async with asyncio.TaskGroup() as group:
            for begin in range(8):
                group.create_task(client(range(begin, ROUNDS, 8)))
        await envoy.idle()
        assert {json.loads(body)["user"] for body in one.bodies} == {str(n) for n in range(ROUNDS)}
        # On a busy machine the client picks some by itself; nothing is reserved for those.
        assert set(envoy.stage.endings) == {Ending.FINISHED}
        assert envoy.stage.sample("kvroute_picker_requests_total", outcome="finished") == ROUNDS


async def test_trailers_of_http_1_are_dropped_and_the_body_is_whole(tmp_path: Path) -> None:
    """As `kvroute envoy-config` has it, with retries."""
    one = Worker(_play)
    async with an_envoy(tmp_path, one) as envoy:
        host, _, port = envoy.base.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(BODY).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        writer.write(b"%x\r\n%b\r\n0\r\nx-sum: 1\r\n\r\n" % (len(content), content))
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert one.bodies == [content]
        writer.close()
        await envoy.idle()


async def test_the_next_of_a_list_serves_where_the_first_is_gone(tmp_path: Path) -> None:
    gone, there = Gone(_play), Worker(_play)
    async with an_envoy(tmp_path, gone, there, fallbacks=1) as envoy:
        for _ in range(20):
            await whole(envoy)
        await envoy.idle()
        assert len(there.bodies) == 20
        assert envoy.stage.sample("kvroute_picker_not_followed_total", endpoint="known") >= 1


async def test_the_address_may_come_by_header_and_over_tls(tmp_path: Path) -> None:
    certificates = Certificates(written(tmp_path, Authority().issue()))

    def changes(config: Config) -> None:
        by_header(config)
        over_tls(config)

    many = workers(3)
    async with an_envoy(tmp_path, *many, certificates=certificates, changes=changes) as envoy:
        for _ in range(30):
            await whole(envoy)
        await envoy.idle()
        assert envoy.stage.endings == {Ending.FINISHED: 30}
        assert envoy.stage.sample("kvroute_picker_connections_total", kind="tls") >= 1


@pytest.mark.parametrize("mib", [1, 20, 50])
async def test_a_long_body_comes_whole(mib: int, tmp_path: Path) -> None:
    async with an_envoy(tmp_path, *workers(1)) as envoy:
        await whole(envoy, mib << 20)
        await envoy.idle()
        assert envoy.stage.sample("kvroute_held_bytes", what="picker_bodies", port="") == 0


async def test_each_chunk_comes_while_the_answer_goes_on(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def two(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with an_envoy(tmp_path, Worker(two)) as envoy, envoy.post(BODY) as answer:
        assert (await answer.content.readany()).endswith(b'"a"}}]}\n\n')
        go_on.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"


async def test_a_worker_that_breaks_its_answer_counts_as_cancelled(tmp_path: Path) -> None:
    """ext_proc doesn't tell it apart from a client that leaves."""

    seen = asyncio.Event()

    async def breaks(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await seen.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async with an_envoy(tmp_path, Worker(breaks)) as envoy:
        async with envoy.post(BODY) as answer:
            assert await answer.content.readany() == b"data: {}\n\n"
            seen.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await envoy.idle()
        await until(lambda: envoy.stage.endings == {Ending.FAILED_CANCELLED: 1}, "it was counted")


@pytest.mark.parametrize("size", [100, 1_000_000])
async def test_a_picker_in_observability_mode_decides_each_request_and_touches_none(
    tmp_path: Path, size: int
) -> None:
    async with an_envoy(tmp_path, *workers(2), changes=observing) as envoy:
        for _ in range(20):
            await whole(envoy, size)
        await until(lambda: envoy.outcomes() == {"observed": 20}, "each is decided")
        observed = envoy.stage.served.fleet.core.fleet.observed
        assert observed.picks == 20
        assert (envoy.stage.open, envoy.stage.endings) == (0, {})
