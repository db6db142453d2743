"""`kvroute picker` as a process of its own: probes over plain HTTP."""

import asyncio

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.app.processes.picker_process import PickerApp
from router.config.keys import ConfigError
from router.config.reading import load
from router.config.settings.configurations import PickerConfig
from tests.stage.served import served

ANY = "127.0.0.1:0"


def an_app(router: str, probes: str = ANY) -> PickerApp:
    given: dict[tuple[str, ...], object] = {
        ("router",): router,
        ("picker", "listen"): ANY,
        ("requests", "accept_after_stop_s"): 60.0,
        ("metrics", "listen"): ANY,
        ("probes", "listen"): probes,
    }
    return PickerApp(load(PickerConfig, None, {}, given))


async def test_probes_say_whether_a_worker_can_be_picked_and_not_serving_from_the_stop_on() -> None:
    async with served() as stage, aiohttp.ClientSession() as session:
        app = an_app(f"127.0.0.1:{stage.server.port}")
        await app.start()

        async def status(path: str) -> int:
            async with session.get(f"http://127.0.0.1:{app.probes_port}{path}") as answer:
                return answer.status

        async def comes(path: str, wanted: int) -> None:
            async with asyncio.timeout(60):
                while await status(path) != wanted:
                    pass

        channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.picker.port}")
        try:
            assert [await status("/livez"), await status("/readyz")] == [200, 503]
            assert await status("/metrics") == 404
            stage.fleet.add("w0")
            await comes("/readyz", 200)
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.create_task(app.stop())  # waits for the gateway's connection
            await comes("/readyz", 503)
            assert await status("/livez") == 200
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
        finally:
            await channel.close()
            await app.stop()
        with pytest.raises(aiohttp.ClientError):
            await status("/livez")


async def test_without_probes_there_is_no_port_and_a_wrong_address_is_named() -> None:
    app = an_app("127.0.0.1:1", probes="")
    assert app.probes_port == 0
    with pytest.raises(ConfigError, match="nowhere"):
        an_app("127.0.0.1:1", probes="nowhere")
