"""Registrations between releases: an older client's reads as before; an older router is noticed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from typing_extensions import override

from events.plane.settings import EngineSettings
from kvroute.v1 import RegisterWorkerRequest, RegisterWorkerResponse, fleet_pb2, fleet_pb2_grpc
from router.cli.calls.fleet_changes import register_worker
from router.desk.request_codec import read_registration
from tests.upgrade.test_upgrade import CONTRACT

ENGINE: dict[str, Any] = {
    "engine": "vllm",
    "address": "http://w:8000",
    "events": "tcp://w:5557",
    "replay": "tcp://w:5558",
    "metrics": "http://w:8001",
    "labels": {"zone": "a"},
    "role": "prefill",
    "warm": True,
}
"""All that r0's registrations carry."""
OPTIONS: dict[str, Any] = {"timeout_s": 5.0, "as_json": False}


def test_an_older_clients_registration_is_read_as_before() -> None:
    name = "kvroute.v1.RegisterWorkerRequest"
    sent = CONTRACT.made(name, worker_id="w", **ENGINE).SerializeToString()
    request = fleet_pb2.RegisterWorkerRequest.FromString(sent)
    assert read_registration(request) == EngineSettings(id="w", **ENGINE)


class OlderFleet(fleet_pb2_grpc.FleetServicer):
    """Reads and answers registrations as r0 does."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    @override
    async def RegisterWorker(  # type: ignore[override]  # the generated one is for both worlds
        self, request: RegisterWorkerRequest, context: Any
    ) -> RegisterWorkerResponse:
        payload = request.SerializeToString()
        self.read.append(CONTRACT.message("kvroute.v1.RegisterWorkerRequest", payload))
        return RegisterWorkerResponse()


@asynccontextmanager
async def older_router() -> AsyncIterator[tuple[OlderFleet, str]]:
    server, fleet = grpc.aio.server(), OlderFleet()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield fleet, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_an_older_router_registers_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    async with older_router() as (fleet, target):
        assert await register_worker("w", ENGINE, target=target, **OPTIONS) == 0
    (read,) = fleet.read
    assert (read.worker_id, read.role, dict(read.labels)) == ("w", "prefill", {"zone": "a"})
    assert "worker w is registered; this router runs its relay until" in capsys.readouterr().out


async def test_settings_that_an_older_router_ignores_are_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = {**ENGINE, "ranks": 2, "model_aliases": ("m",)}
    async with older_router() as (_, target):
        assert await register_worker("w", engine, target=target, **OPTIONS) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "this router's release is older than --model-alias, --ranks" in told.err
    assert len(told.err.splitlines()) == 1
