"""Admits each request of a gateway, then reads its body.

    head        its size (router/net/http), its path and its `Expect`
    identity    the client's key or certificate, and the right that the path needs
    limits      of the gateway: room for the request and for its body; then of that key
    bytes       of the body, counted as they come; refused below a least pace
    unpacking   of the body in steps, with turns of the event loop between

Laws:
- a step begins only after those above it: no body is read before identity and limits are checked;
- a refusal costs what reading a head costs: the rest of the body is dropped without unpacking;
- a request that finds no room uses nothing of its key's limits.
"""

from collections.abc import Collection, Iterator, Mapping

from aiohttp import web
from multidict import CIMultiDict

from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.refusals import GatewayRefusal
from router.gateway.server.reading import BodyReader, go_on
from router.gateway.server.room import Place, Room, client_of
from router.gateway.server.unpacking import encoding_of
from router.net.keys.door import Door
from router.net.keys.issuers import UnknownKeyError
from router.net.keys.key_ring import names_of
from router.net.keys.rights import Right
from router.net.keys.usage import Held, Usage
from router.request.refusal import Refusal

KEY_HEADERS = ("Authorization", "X-Api-Key")
"""Headers that may have a client's key; Anthropic's clients send the second."""
CREDENTIALS = (
    *KEY_HEADERS, "Api-Key", "X-Goog-Api-Key", "X-Auth-Token", "X-Amz-Security-Token", "Cookie",
)  # fmt: skip
"""Headers that prove a client's identity. Where the gateway checks keys, engines get none of them,
or with gateway.pass_keys KEY_HEADERS alone."""
_BEARER = "bearer "


class Entrance:
    """Checks heads and clients of one gateway's requests, and reads their bodies."""

    def __init__(
        self, settings: GatewaySettings, requests: RequestSettings, door: Door | None
    ) -> None:
        """door: checks clients' keys; None: they need none."""
        self._door = door
        self.room = Room(
            open_max=settings.open_max,
            bodies_mib_max=requests.bodies_mib_max,
            body_mib_max=requests.body_mib_max,
            share=settings.client_share,
        )

    def check_head(self, request: web.Request) -> None:
        """Raises GatewayRefusal for a target that is not UTF-8, or an `Expect` other than
        100-continue."""
        target = request.raw_path
        if not target.isascii() and not _is_text(target):
            raise GatewayRefusal(
                "MALFORMED_REQUEST", "the request's path or query is not valid UTF-8"
            )
        expected = request.headers.getall("Expect", ())
        if any(value.strip().lower() != "100-continue" for value in expected):
            raise GatewayRefusal(
                "EXPECTATION_FAILED",
                "the gateway supports no other value of Expect than 100-continue",
            )

    async def usage(self, request: web.Request, right: Right) -> Usage | None:
        """The account of the request's client (router/net/keys/usage.py); None: clients need no
        keys. Raises Refusal for an invalid key, or one that lacks the right."""
        if (door := self._door) is None:
            return None
        token = _token(request.headers)

        def names() -> Iterator[str]:
            transport = request.transport
            return names_of(transport.get_extra_info("peercert") if transport is not None else None)

        try:
            usage = door.enter(token, names, is_unix=False)
        except UnknownKeyError as error:
            usage = await door.enter_after(error, token or "", names)
        usage.identity.check_right(right)
        return usage

    def place(self, request: web.Request, usage: Usage | None, held: Held) -> Place:
        """A place for the request, which counts as open while it is entered (`with`). usage: of its
        key; None: no keys. held: the request, for its key's limit on open ones. Raises Refusal at a
        limit of the key, GatewayRefusal at one of the gateway.
        """
        length = request.content_length or 0
        self.room.check_size(length)
        name = None if usage is None else usage.identity.name
        place = self.room.enter(client_of(name, request.remote))
        place.announced(length)
        if usage is not None:
            usage.request()
            usage.message(length)
            usage.reserved(held)
        return place

    async def body(self, request: web.Request, usage: Usage | None, place: Place) -> bytes:
        """Reads the body and unpacks it; raises GatewayRefusal."""
        length = request.content_length or 0
        reader = BodyReader(request, place, encoding_of(request.headers))
        await go_on(request)
        try:
            return await reader.read()
        finally:  # a body that ends in a refusal was read, too
            if usage is not None and reader.taken > length:
                usage.exceeded(reader.taken - length)


def query_of(request: web.Request) -> str:
    """The query of a request's target, what follows `?`, byte for byte."""
    return request.raw_path.partition("#")[0].partition("?")[2]


def gateway_refusal(refusal: Refusal) -> GatewayRefusal:
    """Turns a router's Refusal into the gateway's GatewayRefusal."""
    refused = GatewayRefusal(refusal.reason.value, refusal.message)
    refused.retry_after_s = refusal.retry_after_s
    return refused


def without_keys(headers: Mapping[str, str], but: Collection[str] = ()) -> CIMultiDict[str]:
    """A request's headers for a worker, without the client's credentials. but: credentials that are
    passed on.
    """
    kept = CIMultiDict(headers)
    for name in CREDENTIALS:
        if name not in but:
            kept.popall(name, None)
    return kept


def _token(headers: Mapping[str, str]) -> str | None:
    """The client's key, in Authorization, or if that is absent in X-Api-Key; empty: Authorization
    has no bearer token; None: both are absent."""
    if (value := headers.get("Authorization")) is not None:
        return value[7:].strip() if value[:7].lower() == _BEARER else ""
    return headers.get("X-Api-Key")


def _is_text(value: str) -> bool:
    """Whether a text of aiohttp's came as UTF-8: other bytes are read as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
