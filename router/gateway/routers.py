"""The calls that a gateway or picker makes to a router: about requests, and the list of workers.

A KvRouteClient makes them over gRPC, router/api/service/local_router.py in the same process.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Unpack

from kvroute.client import Attempts, Pick, RoutedRequest, RouteOptions
from kvroute.v1 import WorkerStatus


class Router(AbstractAsyncContextManager[Any], Protocol):
    """Interface of a router, or of its replicas; used between __aenter__ and __aexit__. Its methods
    raise KvRouteError.
    """

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters of the calls since the start, by name: see RequestCalls.counts."""

    async def route(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Pick:
        """Picks a worker and reserves the request's load there: see RequestCalls.route."""

    def request(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> RoutedRequest:
        """One request, routed when it is entered: see RequestCalls.request."""

    def attempts(
        self,
        *,
        attempts_max: int = 3,
        timeout_s: float | None = None,
        **options: Unpack[RouteOptions],
    ) -> Attempts:
        """One request, tried on several workers: see RequestCalls.attempts."""

    async def list_workers(
        self, model: str | None = None, *, away: bool = False
    ) -> list[WorkerStatus]:
        """Every worker that the router knows, by id and rank. model: None: of all models. away:
        only workers whose relay is silent, or whose engine does not answer its relay.
        """
