"""CORS: which origins' pages may read answers in a browser (WHATWG's Fetch). Pure.

Laws:
- every answer to a request with a readable head, a refusal too, has the CORS headers of the
  gateway's own rule, and none of an engine's;
- no answer allows credentials, so that a page can use no cookie and no certificate of its visitor.
"""

import re
from collections.abc import Mapping, MutableMapping

from multidict import istr

ANY = "*"
MAX_AGE_S = 600
"""Seconds for which a browser keeps the answer to a preflight."""
REQUESTED_MAX = 2048
"""Most characters of an Access-Control-Request-Headers whose names are allowed as requested."""
ENGINES = tuple(
    istr(f"Access-Control-{name}")
    for name in (
        "Allow-Origin", "Allow-Credentials", "Allow-Headers", "Allow-Methods", "Expose-Headers",
        "Max-Age", "Allow-Private-Network",
    )
)  # fmt: skip
"""CORS headers of an engine's answer, which are removed."""
USUAL = "Authorization, Content-Type, X-Api-Key"
"""Request headers that a page may send if its preflight names none."""
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]*", re.ASCII)


class Cors:
    """The CORS rule of one gateway."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """origins: origins whose pages may read answers, scheme://host[:port] each, or "*" for all;
        empty: only the gateway's own origin.
        """
        self._any = ANY in origins
        self._origins = frozenset(origins)

    def apply(
        self, request: Mapping[str, str], answer: MutableMapping[str, str], *, methods: str = ""
    ) -> None:
        """Sets the CORS headers of an answer. request: headers of the request. answer: headers of
        its answer, which are changed. methods: methods of the path, for the answer to OPTIONS.
        """
        for name in ENGINES:
            if name in answer:
                del answer[name]  # each of that name
        if not self._origins:
            return
        if not self._any:
            _vary(answer, "Origin")
        origin = request.get("Origin")
        if origin is None or not (self._any or origin in self._origins):
            return
        answer["Access-Control-Allow-Origin"] = ANY if self._any else origin
        answer["Access-Control-Expose-Headers"] = "*"
        if methods:
            requested = request.get("Access-Control-Request-Headers", "")
            if len(requested) > REQUESTED_MAX or not _NAMES.fullmatch(requested):
                requested = ""
            _vary(answer, "Access-Control-Request-Headers")
            answer["Access-Control-Allow-Methods"] = methods
            # By name: `*` does not stand for Authorization.
            answer["Access-Control-Allow-Headers"] = requested or USUAL
            answer["Access-Control-Max-Age"] = str(MAX_AGE_S)


def _vary(answer: MutableMapping[str, str], name: str) -> None:
    varied = answer.get("Vary")
    answer["Vary"] = f"{varied}, {name}" if varied else name
