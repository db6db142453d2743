"""Finds the handler of a path in bounded time, whatever the request's head.

Laws:
- a path with more parts than any of ours is not searched for: aiohttp's search takes each of its
  ends in turn, 24 ms for 8,000 slashes;
- an expectation that is not met is a 417, whatever bytes it has.
"""

from aiohttp import web
from aiohttp.web_urldispatcher import MatchInfoError
from typing_extensions import override

PARTS_MAX = 8


class Paths(web.UrlDispatcher):
    """Dispatcher of a port with few paths: a path of too many parts is answered with 404, an Expect
    other than 100-continue with 417.
    """

    @override
    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        expected = request.headers.get("Expect", "")
        if expected and expected.strip().lower() != "100-continue":
            return _refused(web.HTTPExpectationFailed())
        if request.rel_url.raw_path.count("/") > PARTS_MAX:
            return _refused(web.HTTPNotFound())
        return await super().resolve(request)


def application() -> web.Application:
    """A new aiohttp application with this dispatcher."""
    app = web.Application()
    app._router = Paths()
    return app


def _refused(error: web.HTTPException) -> web.UrlMappingMatchInfo:
    refused = MatchInfoError(error)
    # aiohttp's own writes what was expected into its answer, and fails at bytes that are no text.
    refused.route._expect_handler = _ignored
    return refused


async def _ignored(_request: web.Request) -> None:
    """The handler says what becomes of the request."""
