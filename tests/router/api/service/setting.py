"""Fleets and calls that several tests of the service begin with."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from indexer.identity import WorkerKey
from kvroute.v1 import router_pb2
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import Served

Code = grpc.StatusCode


def one_worker(fleet: Fleet) -> None:
    fleet.add("w0", max_model_len=10_000)


def nobody(_: Fleet) -> None:
    pass


def two_models(fleet: Fleet) -> None:
    fleet.add("a", model="alpha")
    fleet.add("b", model="beta")


def gone(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.core.remove("w0", 3600.0, fleet.now_s)


def sick(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.say(WorkerKey("w0", 0), healthy=False)


def drained(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.core.drain("w0")


def full(fleet: Fleet) -> None:
    fleet.say(fleet.add("w0", total_slots=4), running=4)


def taken(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.route(prompt(100), request_id="x")


def overbooked(fleet: Fleet) -> None:
    one_worker(fleet)
    for _ in range(3):
        fleet.route(prompt(100))


async def in_batch(stage: Served, request: router_pb2.RouteRequest) -> router_pb2.RouteResult:
    (result,) = await batch(stage, router_pb2.RouteItem(index=7, request=request))
    assert result.index == 7
    return result


async def batch(stage: Served, *items: router_pb2.RouteItem) -> list[router_pb2.RouteResult]:
    call = stage.router.RouteStream()
    await call.write(router_pb2.RouteBatch(items=items))
    await call.done_writing()
    results = [result async for answer in call for result in answer.results]
    assert await call.code() is Code.OK
    return results


def tasks() -> set[asyncio.Task[Any]]:
    """All tasks but those in which gRPC waits for the next call."""
    return {task for task in asyncio.all_tasks() if "AioServer" not in repr(task)}
