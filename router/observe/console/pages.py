"""The console over HTTP, on the port of the metrics: its files, sign-in, and server-sent events.

    GET    /console/            the page, and its files; they hold nothing of the fleet
    GET    /console/session     200: signed in; 401: how to sign in
    POST   /console/session     {"token": KEY} -> a cookie
    DELETE /console/session     ends the session
    GET    /console/events      server-sent events
    GET    /console/decisions?id=ID   the picks of a request, a client or a reservation

Laws:
- what a request brings is compared, and never written into a page;
- nothing of the fleet leaves without a caller with the right `observe`, where callers need keys.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie

import msgspec
from aiohttp import web

from router.config.settings.console_settings import ConsoleSettings
from router.net.keys.door import Door
from router.net.keys.identity import Identity
from router.net.keys.issuers import UnknownKeyError
from router.net.keys.key_ring import names_of
from router.net.keys.rights import Right
from router.net.listener.turns import turned
from router.observe.console.assets import read_assets
from router.observe.console.console import Console
from router.observe.console.origins import host_fits, origin_fits
from router.observe.console.sessions import Sessions
from router.observe.console.viewers import Viewer
from router.request.refusal import Reason, Refusal

PATH = "/console"
COOKIE = "kvroute_console_"
"""Beginning of the cookie's name, followed by the end of the replica's name: browsers send a host's
cookies to all of its ports, so routers on one host need different names."""
BODY_MAX = 16_384
"""Most bytes of a sign-in's body: an issuer's tokens have a few thousand."""
ID_MAX = 1024
"""Most characters of an id in GET /console/decisions."""
LOOK_S = 10
"""Messages, a second each, after which a viewer's key is looked up again."""
SOCKET_BYTES = 256 * 1024
"""Bytes of messages in the system's buffer of a connection, at most, which would grow to megabytes
for a page that reads nothing."""
RETRY_MS = 2000
"""Milliseconds after which a browser connects again."""
RESULTS = ("ok", "refused", "malformed")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

log = logging.getLogger("kvroute.console")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _SignIn(msgspec.Struct):
    token: str


class ConsolePages:
    """The HTTP routes of one console."""

    def __init__(
        self,
        console: Console,
        settings: ConsoleSettings,
        *,
        door: Door | None,
        secure: bool,
        sessions: Sessions,
        clock: Callable[[], float],
    ) -> None:
        """door: None: callers need no keys, and the port is on loopback. secure: whether the port
        has TLS. clock: monotonic seconds.
        """
        self.sign_ins: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.turned_away = 0
        """Requests with a Host or an Origin of another site."""
        self.console = console
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        self._door = door
        self._secure = secure
        self._sessions = sessions
        self._clock = clock
        self._assets = read_assets()
        self._cookie = COOKIE + console.about["replica"][-8:]

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        app.router.add_get(PATH, self._moved)
        app.router.add_get(PATH + "/", self._checked(self._page))
        app.router.add_get(PATH + "/session", self._checked(self._session))
        app.router.add_post(PATH + "/session", self._checked(self._sign_in, own_page=True))
        app.router.add_delete(PATH + "/session", self._checked(self._sign_out, own_page=True))
        app.router.add_get(PATH + "/events", self._checked(self._events))
        app.router.add_get(PATH + "/decisions", self._checked(self._decisions))
        app.router.add_get(PATH + "/{name}", self._checked(self._page))

    def _checked(self, handler: Handler, *, own_page: bool = False) -> Handler:
        """A handler behind the checks of Host and Origin, which answers a Refusal with 401 or 403.
        own_page: whether the request needs an Origin header."""

        async def handle(request: web.Request) -> web.StreamResponse:
            guarded = self._door is not None
            scheme = "https" if self._secure else "http"
            if not (
                host_fits(request.headers.get("Host", ""), self._hosts, guarded=guarded)
                and origin_fits(request.headers, scheme, needed=own_page)
            ):
                self.turned_away += 1
                return _text(403, "not for this Host or from this Origin: see console.hosts\n")
            try:
                return await handler(request)
            except Refusal as refusal:
                return self._refused(refusal)

        return handle

    async def _moved(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": PATH + "/", **HEADERS})

    async def _page(self, request: web.Request) -> web.StreamResponse:
        asset = self._assets.get(request.match_info.get("name", "index.html"))
        if asset is None:
            return _text(404, "no such page\n")
        headers = {"Content-Type": asset.content_type, "ETag": asset.etag}
        headers |= HEADERS | {"Cache-Control": "no-cache"}
        if asset.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=asset.body, headers=headers)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        identity = await self._viewer(request)
        name = None if identity is None else identity.name
        return _json(200, {"identity": name, "replica": self.console.about["replica"]})

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        if self._door is None:
            return _json(200, {"identity": None})
        try:
            token = _token(await _body(request))
        except ValueError as error:
            self.sign_ins["malformed"] += 1
            return _json(400, {"message": str(error)})
        try:
            identity = await self._identity(request, token)
        except Refusal as refusal:
            self.sign_ins["refused"] += 1
            log.warning("sign-in to the console refused: %s", refusal.message)
            raise
        self.sign_ins["ok"] += 1
        log.info("identity %r signed in to the console", identity.name)
        response = _json(200, {"identity": identity.name})
        response.set_cookie(
            self._cookie,
            self._sessions.begin(token, self._clock()),
            max_age=int(self._sessions.session_s),
            path=PATH,
            secure=self._secure,
            httponly=True,
            samesite="Strict",
        )
        return response

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        self._sessions.end(self._session_id(request))
        response = _json(200, {"identity": None})
        response.del_cookie(self._cookie, path=PATH)
        return response

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        await self._viewer(request)
        wanted = request.query.get("id", "")
        if not 0 < len(wanted) <= ID_MAX:
            return _json(400, {"message": f"the parameter id must have 1 to {ID_MAX} characters"})
        return _json(200, {"decisions": await turned(self.console.find(wanted))})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        await self._viewer(request)
        handler = asyncio.current_task()

        def cut() -> None:
            if request.transport is not None:
                request.transport.abort()  # what waits in its socket may wait for ever
            if handler is not None:
                handler.cancel()

        viewer = self.console.join(cut)
        if viewer is None:
            response = _json(503, {"message": "too many pages watch"})
            response.headers["Retry-After"] = "10"
            return response
        try:
            return await self._send(request, viewer)
        except ConnectionError:  # the browser is gone
            return web.Response()
        finally:
            self.console.viewers.leave(viewer)

    async def _send(self, request: web.Request, viewer: Viewer) -> web.StreamResponse:
        """Sends messages until the viewer's end, or the key's."""
        if request.transport is not None:
            request.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES
            )
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers | HEADERS | {"Cache-Control": "no-store"})
        await response.prepare(request)
        await response.write(b"retry: %d\n\n" % RETRY_MS)
        sent = 0
        while (message := await viewer.next()) is not None:
            if sent and sent % LOOK_S == 0 and not await self._may_stay(request):
                self.console.viewers.leave(viewer, "signed_out")
                break
            await response.write(message)
            sent += 1
        if viewer.end == "signed_out":
            await response.write(b"event: signed_out\ndata: {}\n\n")
        return response

    async def _may_stay(self, request: web.Request) -> bool:
        try:
            await self._viewer(request)
        except Refusal:
            return False
        return True

    async def _viewer(self, request: web.Request) -> Identity | None:
        """The identity of a request's caller; None: callers need no keys. Raises Refusal."""
        if self._door is None:
            return None
        session = self._sessions.find(self._session_id(request), self._clock())
        return await self._identity(request, None if session is None else session.token)

    async def _identity(self, request: web.Request, token: str | None) -> Identity:
        """The identity of a key, or of the connection's certificate; raises Refusal."""
        door = self._door
        assert door is not None
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        try:
            usage = door.enter(token, lambda: names_of(certificate), is_unix=False)
        except UnknownKeyError as error:
            usage = await door.enter_after(error, token or "", lambda: names_of(certificate))
        identity = usage.identity
        identity.check_right(Right.OBSERVE)
        if identity.sight is not None:
            raise Refusal(
                Reason.PERMISSION_DENIED,
                "this key sees some workers or models only, and the console shows all of them",
            )
        return identity

    def _session_id(self, request: web.Request) -> str:
        """Session id of the request's cookie; empty: there is none."""
        try:
            morsel = SimpleCookie(request.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value

    def _refused(self, refusal: Refusal) -> web.Response:
        status = 403 if refusal.reason is Reason.PERMISSION_DENIED else 401
        takes = self._door is not None and self._door.takes_tokens
        return _json(
            status, {"message": refusal.message, "by": "token" if takes else "certificate"}
        )


async def _body(request: web.Request) -> bytes:
    """The body of a sign-in; raises ValueError for more than BODY_MAX bytes, or other than JSON."""
    if request.content_type != "application/json":
        raise ValueError("the body of a sign-in must be JSON")
    body = await request.content.read(BODY_MAX + 1)
    while len(body) <= BODY_MAX and not request.content.at_eof():
        body += await request.content.read(BODY_MAX + 1 - len(body))
    if len(body) > BODY_MAX:
        raise ValueError(f"the body of a sign-in has at most {BODY_MAX} bytes")
    return body


def _token(body: bytes) -> str:
    """The key of a sign-in; raises ValueError."""
    token = msgspec.json.decode(body, type=_SignIn).token.strip()
    if not token:
        raise ValueError("the key is empty")
    return token


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, headers=HEADERS)


def _json(status: int, content: object) -> web.Response:
    headers = {"Content-Type": "application/json", **HEADERS, "Cache-Control": "no-store"}
    return web.Response(status=status, body=msgspec.json.encode(content), headers=headers)
