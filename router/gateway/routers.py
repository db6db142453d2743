"""The calls that a gateway or picker makes to a router: about requests, and the list of workers.

A KvRouteClient has them over gRPC, router/api/service/local_router.py in the same process.
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
        """See RequestCalls.counts."""

    async def route(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> Pick:
        """See RequestCalls.route."""

    def request(
        self, *, timeout_s: float | None = None, **options: Unpack[RouteOptions]
    ) -> RoutedRequest:
        """See RequestCalls.request."""

    def attempts(
        self,
        *,
        attempts_max: int = 3,
        timeout_s: float | None = None,
        **options: Unpack[RouteOptions],
    ) -> Attempts:
        """See RequestCalls.attempts."""

    async def list_workers(
        self, model: str | None = None, *, away: bool = False
    ) -> list[WorkerStatus]:
        """Every worker that the router knows, by id and rank. away: only workers that stopped
        answering.
        """
