"""The worker that holds each response of /v1/responses, for requests that continue it. Pure.

Engines keep responses in their own memory, so a request with `previous_response_id` can be served
by the worker that gave that response, and by no other.

Laws:
- a response is known to its owner alone; while it is known, no other owner can take its id;
- at most `most` responses are known, each for ttl_s; past the bound the oldest is forgotten.
"""

from collections import OrderedDict

Owner = tuple[str, str]
"""Name of the client's key, and tenant: see Exchange.owner."""
RESPONSES_MAX = 65_536
RESPONSE_TTL_S = 24 * 3600.0


class ResponseWorkers:
    """Workers of the responses that one gateway has passed on."""

    def __init__(self, most: int = RESPONSES_MAX, ttl_s: float = RESPONSE_TTL_S) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._known: OrderedDict[str, tuple[str, Owner, float]] = OrderedDict()
        """Response's id -> worker's id, owner, and when the entry ends; the oldest first."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, response_id: str, worker_id: str, now_s: float, owner: Owner = ("", "")) -> None:
        """Records the worker that gave a response to a request of this owner."""
        known = self._known.get(response_id)
        if known is not None and known[1] != owner and now_s < known[2]:
            return
        self._known.pop(response_id, None)
        self._known[response_id] = worker_id, owner, now_s + self._ttl_s
        while len(self._known) > self._most or next(iter(self._known.values()))[2] <= now_s:
            self._known.popitem(last=False)

    def worker(self, response_id: str, now_s: float, owner: Owner = ("", "")) -> str | None:
        """Id of the worker that holds a response; None: unknown for this owner, or too old."""
        worker_id, known_to, until_s = self._known.get(response_id, ("", owner, now_s))
        return worker_id if now_s < until_s and known_to == owner else None

    def is_anothers(self, response_id: str, now_s: float, owner: Owner) -> bool:
        """Whether a response is known, but belongs to another owner."""
        _, known_to, until_s = self._known.get(response_id, ("", owner, now_s))
        return now_s < until_s and known_to != owner
