"""The gRPC server: health, reflection, limits, its start and its end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.api.service import calls
from router.api.service.grpc_bounds import GrpcBounds
from router.api.service.health_service import HealthService
from router.api.service.router_service import jittered
from router.api.service.server import SERVICES
from router.config.keys import ConfigError
from router.config.settings.serving_settings import GrpcSettings
from tests.router.api.service.setting import Code, tasks
from tests.stage.served import Served, refusal, served

REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class TestHealth:
    NAMES = ("", "liveness", "readiness", *SERVICES)

    async def states(self, stage: Served) -> dict[str, int]:
        stub = health_pb2_grpc.HealthStub(stage.channel)
        return {
            name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
            for name in self.NAMES
        }

    async def test_everything_follows_readiness_but_liveness(self, empty: Served) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        alive_only = dict.fromkeys(self.NAMES, not_serving) | {"liveness": serving}
        assert await self.states(empty) == alive_only
        empty.server.set_serving(ready=True)
        assert await self.states(empty) == dict.fromkeys(self.NAMES, serving)
        empty.server.set_serving(ready=False)
        assert await self.states(empty) == alive_only

    async def test_services_are_those_of_the_contract(self) -> None:
        assert SERVICES == ("kvroute.v1.Router", "kvroute.v1.Fleet", "kvroute.v1.Prompts")

    async def test_an_unknown_name_is_not_found(self, empty: Served) -> None:
        stub = health_pb2_grpc.HealthStub(empty.channel)
        request = health_pb2.HealthCheckRequest(service="nonsense")
        assert (await refusal(stub.Check(request))).code is Code.NOT_FOUND

    async def test_a_watch_sees_the_drain_and_does_not_hold_it_up(self) -> None:
        async with served() as stage, asyncio.timeout(60):
            stage.server.set_serving(ready=True)
            before = tasks()
            stub = health_pb2_grpc.HealthStub(stage.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await stage.server.drain(60)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            while left := tasks() - before:
                await asyncio.wait(left, timeout=0.01)

    async def test_a_watcher_that_does_not_read_holds_up_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = asyncio.Event()

        async def unread(*_: object) -> None:
            written.set()
            await asyncio.Event().wait()

        async with served() as stage, asyncio.timeout(60):
            stub = health_pb2_grpc.HealthStub(stage.channel)
            request = health_pb2.HealthCheckRequest(service="readiness")
            with monkeypatch.context() as patch:
                patch.setattr(calls, "sent", unread)
                slow = stub.Watch(request)
                await written.wait()
            stage.server.set_serving(ready=True)
            watch = stub.Watch(request)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            slow.cancel()

    async def test_a_watch_of_an_unknown_name_sees_it_come(self) -> None:
        async with served() as stage, asyncio.timeout(60):
            request = health_pb2.HealthCheckRequest(service="coming")
            watch = health_pb2_grpc.HealthStub(stage.channel).Watch(request)
            states = health_pb2.HealthCheckResponse
            assert (await watch.read()).status == states.SERVICE_UNKNOWN
            health = stage.server._health
            health.set("coming", states.NOT_SERVING)
            assert (await watch.read()).status == states.NOT_SERVING
            health.set("coming", states.NOT_SERVING)  # is not sent again
            health.set("other", states.SERVING)
            health.set("coming", states.SERVING)
            assert (await watch.read()).status == states.SERVING
            watch.cancel()

    async def test_a_watch_that_begins_in_a_drain_gets_the_state_and_ends(self) -> None:
        health = HealthService()
        health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        health.end_watches()
        call: Any = None
        watch = health.Watch(health_pb2.HealthCheckRequest(), call)
        states = [answer.status async for answer in watch]
        assert states == [health_pb2.HealthCheckResponse.NOT_SERVING]

    async def test_who_drains_is_never_ready_again(self, empty: Served) -> None:
        empty.server.set_serving(ready=True)
        await empty.server.drain(0)
        empty.server.set_serving(ready=True)
        # Nobody can ask over the wire any more; a Watch that lags behind still could see it.
        request = health_pb2.HealthCheckRequest(service="")
        told: Any = await empty.server._health.Check(request, None)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING


class TestServer:
    def test_a_stream_s_age_is_within_the_grace_of_its_connection(self) -> None:
        bounds = GrpcBounds(age_grace_s=10.0)
        ages_s = [jittered(bounds.stream_age_s) or 0.0 for _ in range(100)]
        assert 4.0 <= min(ages_s) < max(ages_s) <= 8.0
        assert jittered(None) is None

    async def test_reflection_names_every_service(self, empty: Served) -> None:
        assert await self.reflected(empty) == {*SERVICES, "grpc.health.v1.Health", *REFLECTIONS}

    @pytest.mark.parametrize("name", REFLECTIONS)
    async def test_reflection_describes_every_service_it_names(
        self, name: str, empty: Served
    ) -> None:
        messages = reflection_pb2
        ask = empty.channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            messages.ServerReflectionRequest.SerializeToString,
            messages.ServerReflectionResponse.FromString,
        )()
        await ask.write(messages.ServerReflectionRequest(list_services=""))
        names = [one.name for one in (await ask.read()).list_services_response.service]
        assert name in names
        for service in names:
            await ask.write(messages.ServerReflectionRequest(file_containing_symbol=service))
            files = (await ask.read()).file_descriptor_response.file_descriptor_proto
            described = FileDescriptorProto.FromString(files[0])
            package, _, own = service.rpartition(".")
            assert described.package == package
            (methods,) = (one.method for one in described.service if one.name == own)
            for method in methods:
                symbol = f"{service}.{method.name}"
                await ask.write(messages.ServerReflectionRequest(file_containing_symbol=symbol))
                files = (await ask.read()).file_descriptor_response.file_descriptor_proto
                assert FileDescriptorProto.FromString(files[0]) == described
        await ask.write(messages.ServerReflectionRequest(file_containing_symbol="a.B.c"))
        missing = (await ask.read()).error_response
        assert missing.error_code == Code.NOT_FOUND.value[0]

    async def reflected(self, stage: Served) -> set[str]:
        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        stub = reflection_pb2_grpc.ServerReflectionStub(stage.channel)
        return {
            service.name
            async for answer in stub.ServerReflectionInfo(ask())
            for service in answer.list_services_response.service
        }

    async def test_a_second_server_on_a_port_fails_and_names_it(self, empty: Served) -> None:
        listen = f"127.0.0.1:{empty.server.port}"
        with pytest.raises(ConfigError, match=listen):
            async with served(grpc_settings=GrpcSettings(listen=listen)):
                pass

    async def test_a_unix_socket_serves_too(self, tmp_path: Any) -> None:
        path = f"{tmp_path}/s"
        async with served(
            grpc_settings=GrpcSettings(listen="127.0.0.1:0", unix_socket=path)
        ) as stage:
            stage.fleet.add("w0")
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                stage.channel = channel
                assert (await stage.route()).worker_id == "w0"
