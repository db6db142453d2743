"""CORS: which origins' pages may read answers in a browser (WHATWG's Fetch). Pure.

Laws:
- every answer to a head that can be read has the headers of the gateway's own rule, a refusal too,
  and none of an engine's;
- no answer allows credentials, so that a page can use no cookie and no certificate of its visitor.
"""

import re
from collections.abc import Mapping, MutableMapping

from multidict import istr

ANY = "*"
MAX_AGE_S = 600
"""Seconds for which a browser keeps the answer to a preflight."""
REQUESTED_MAX = 2048
"""Characters of Access-Control-Request-Headers that are answered."""
ENGINES = tuple(
    istr(f"Access-Control-{name}")
    for name in (
        "Allow-Origin", "Allow-Credentials", "Allow-Headers", "Allow-Methods", "Expose-Headers",
        "Max-Age", "Allow-Private-Network",
    )
)  # fmt: skip
"""Headers of an engine's own rule, which do not pass."""
USUAL = "Authorization, Content-Type, X-Api-Key"
"""Headers that a page may send if it does not say which."""
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]*", re.ASCII)


class Cors:
    """The CORS rule of one gateway."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """origins: allowed ones, scheme://host[:port] each, or "*"; empty: pages of other origins
        read nothing.
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
