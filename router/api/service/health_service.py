"""The service grpc.health.v1.Health: whether each service is serving, and nothing else.

It replaces the servicer of grpcio-health-checking, which holds a lock of the service's name while
it writes to a watcher: a watcher that does not read keeps the state from being set, and a drain
from beginning. There, each watcher that leaves also looks through all the others.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

from router.api.service.calls import Context

Response = health_pb2.HealthCheckResponse
State: TypeAlias = Any
"""A value of HealthCheckResponse.ServingStatus."""


class HealthService:
    """Serving states of services, by name."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._watchers: set[asyncio.Event] = set()
        """An event for each open Watch call, set when a state has changed."""
        self._ended = False

    def set(self, service: str, state: State) -> None:
        self._states[service] = state
        self._wake()

    def end_watches(self) -> None:
        """Ends all open Watch calls, each after it has sent its last state; a call whose client
        does not read ends after GrpcBounds.read_timeout_s."""
        self._ended = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Response:
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return Response(status=state)

    async def List(self, request: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no List: call Check or Watch")

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[Response]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            sent: State | None = None
            while True:
                changed.clear()
                state = self._states.get(request.service, Response.SERVICE_UNKNOWN)
                if state != sent:
                    yield Response(status=state)
                    sent = state
                elif self._ended:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers.remove(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
