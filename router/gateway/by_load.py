"""The fallback of gateway and picker: a request that a router can't make tokens of goes by load.
Pure: what asks the router is the caller's."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvroute.client import KvRouteError
from router.gateway.exchange import Exchange, goes_by_load

T = TypeVar("T")


async def or_by_load(
    exchange: Exchange,
    tries: Callable[[bool], Awaitable[T]],
    failed: Callable[[KvRouteError], object],
    counted: Callable[[str], object],
) -> T:
    """What `tries` returns; called again with True where the prompt has to be left out. failed: is
    called with each refusal, and may raise. counted: with the reason of a second call. Raises
    KvRouteError."""
    by_load = not exchange.has_body
    while True:
        try:
            return await tries(by_load)
        except KvRouteError as error:
            failed(error)
            if by_load or not goes_by_load(error.reason, error.code.name):
                raise
            counted(error.reason or error.code.name)
            by_load = True
