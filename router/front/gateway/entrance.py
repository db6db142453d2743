"""Lets an HTTP request in: whose it is, by its key or its certificate."""

from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from router.keys.door import Door
from router.keys.issuers import UnknownKeyError
from router.keys.rights import Right
from router.keys.usage import Usage

KEY_HEADERS = ("Authorization", "X-Api-Key")
"""The second is that of Anthropic's clients."""
_BEARER = "bearer "


async def entered(door: Door, request: web.Request) -> Usage:
    """The client of a request, which may use models; raises Refusal."""
    token = _token(request.headers)

    def names() -> Iterator[str]:
        transport = request.transport
        return names_of(transport.get_extra_info("peercert") if transport is not None else None)

    try:
        usage = door.enter(token, names, is_unix=False)
    except UnknownKeyError as error:
        usage = await door.enter_after(error, token or "", names)
    usage.identity.check_right(Right.ROUTE)
    return usage


def without_keys(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A request's headers for a worker."""
    kept = CIMultiDict(headers)
    for name in KEY_HEADERS:
        kept.popall(name, None)
    return kept


def names_of(certificate: Mapping[str, Any] | None) -> Iterator[str]:
    """Names of a client's verified certificate, as KeyRing takes them."""
    if not certificate:
        return
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("URI", "DNS", "IP Address"):
            yield name
    for part in certificate.get("subject", ()):
        for field, value in part:
            if field == "commonName":
                yield f"cn:{value}"


def _token(headers: Mapping[str, str]) -> str | None:
    """Of both headers the first that holds something."""
    if (value := headers.get("Authorization")) is not None:
        return value[7:].strip() if value[:7].lower() == _BEARER else ""
    return headers.get("X-Api-Key")
