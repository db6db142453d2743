"""`kvroute simulate --gateway` when its workers don't become ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
from rich.console import Console

from kvroute.client import KvRouteClient
from kvroute.v1 import WatchWorkersResponse, WorkerStatus
from simulator.cli import gateway


class Client:
    """A client of a router that knows one worker of two."""

    async def wait_ready(self, timeout_s: float) -> None:
        pass

    async def watch_workers(self) -> AsyncIterator[WatchWorkersResponse]:
        yield WatchWorkersResponse(changed=[WorkerStatus(worker_id="w0", schedulable=True)])
        await asyncio.Event().wait()


async def test_workers_that_do_not_come_are_counted_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "READY_S", 0.0)
    with pytest.raises(TimeoutError, match="1 of 2 engines are ready at the router after 0 s"):
        await gateway.workers_ready(cast(KvRouteClient, Client()), 2)


class Router:
    """A router that runs until it is cancelled."""

    def __init__(self, _: Any) -> None:
        self.is_running = False

    async def run(self) -> int:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as the end of a real router, which takes turns of the loop
            self.is_running = False
        return 0


async def test_the_router_has_ended_when_its_workers_were_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(client: KvRouteClient, count: int) -> None:
        assert router.is_running
        raise TimeoutError("late")

    router = Router(None)
    monkeypatch.setattr(gateway, "RouterApp", lambda _: router)
    monkeypatch.setattr(gateway, "workers_ready", late)
    with pytest.raises(TimeoutError, match="late"):
        await gateway.run_with_gateway(
            nullcontext([]), Console(quiet=True), host="127.0.0.1", listen="", grpc_listen=""
        )
    assert not router.is_running
