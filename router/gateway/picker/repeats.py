"""Requests that Envoy sends to the picker twice: the second stream gets the first's pick. Pure.

Envoy AI Gateway has the picker's filter once for each route of a pool, so that one request comes by
several streams of ext_proc, each later one with the headers that the one before it has set.

Law: a pick is given again once, less than REPEAT_S after it, while its first stream is open, to a
stream of the same connection with the same request id, path and endpoint; never the pick of a
request whose client named an endpoint, so that clients gain nothing by sending these headers.
"""

from collections.abc import Mapping
from typing import NamedTuple

from router.gateway.picker.messages import ENDPOINT

REPEAT_S = 1.0
REQUEST_ID = "x-request-id"
_Key = tuple[str, str, str]


class Answered(NamedTuple):
    """A pick as it was sent to Envoy, and until when it may be repeated, by the loop's clock."""

    endpoints: str
    headers: Mapping[str, str]
    until_s: float


class Repeats:
    """The picks of one connection's open streams."""

    def __init__(self) -> None:
        self._picks: dict[_Key, Answered] = {}

    def __len__(self) -> int:
        return len(self._picks)

    def answered(
        self,
        path: str,
        of_client: Mapping[str, str],
        endpoints: str,
        headers: Mapping[str, str],
        now_s: float,
    ) -> _Key | None:
        """Records a request's pick: its endpoints, and headers for the worker. Returns the key to
        call `left` with; None: the pick is never repeated. of_client: the request's headers, names
        in lower case.
        """
        set_now = {name.lower(): value for name, value in headers.items()}
        request_id = set_now.get(REQUEST_ID, of_client.get(REQUEST_ID, ""))
        if not request_id or ENDPOINT in of_client:
            return None
        key = request_id, path, endpoints
        self._picks[key] = Answered(endpoints, headers, now_s + REPEAT_S)
        return key

    def take(self, path: str, of_client: Mapping[str, str], now_s: float) -> Answered | None:
        """Takes the pick that the same request got by an earlier stream; None: there is none."""
        key = of_client.get(REQUEST_ID, ""), path, of_client.get(ENDPOINT, "")
        known = self._picks.pop(key, None)
        return known if known is not None and now_s < known.until_s else None

    def left(self, key: _Key | None) -> None:
        """Forgets the pick of a request whose first stream is over."""
        if key is not None:
            self._picks.pop(key, None)
