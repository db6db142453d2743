"""Requests of a router's decision log as rows of a trace, to replay recorded traffic with other
policies, other numbers of engines or other caches.

A line needs the hashes of its prompt (`decision_log.hashes`). A request that was refused and tried
again counts once, at its first line; a request that was refused before any worker was looked at has
no prompt in the log, and is left out. A request whose tokens the router did not know, such as of
/v1/embeddings, shares its prompt with no other. Output tokens are those that the request expected,
a client's `max_tokens`: the log does not have the answer's length.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from router.observe.audit.logged_decision import LoggedDecision
from simulator.traffic.trace_columns import PromptTokens, TraceError

OUTPUT_TOKENS = 256
"""Output tokens of a request that expected no number."""
REQUESTS_MAX = 10_000_000
"""Requests of a log whose ids are remembered, in 1 GB. Later requests count each time they are
logged."""


class LoggedTrace:
    """Reads the lines of one decision log, in their order."""

    def __init__(self) -> None:
        self.id_tokens = 0
        """Tokens of each of `hash_ids`: the block size of the first line's workers."""
        self._seen: set[str] = set()

    @staticmethod
    def is_logged(cells: Mapping[str, Any]) -> bool:
        """Whether a line's fields are those of kvroute's decision log; no trace has them."""
        return "v" in cells and "replica" in cells

    def cells(self, logged: Mapping[str, Any], number: int) -> dict[str, Any] | None:
        """The cells of a line's request, by names of simulator/traffic/trace_columns.py; None: the
        line adds no request. number: of the line, for errors. Raises TraceError."""
        content = logged.get("decision") if "reason" in logged else logged
        if content is None:
            return None
        try:
            line = msgspec.convert(content, LoggedDecision)
            msgspec.convert(line.prompt_tokens, PromptTokens)
        except msgspec.ValidationError as error:
            raise TraceError(f"line {number}: no line of a decision log: {error}") from error
        if line.prefixes is None:
            raise TraceError(
                f"line {number}: the line has no hashes of its prompt: decision_log.hashes was off"
            )
        if line.request_id in self._seen:
            return None
        if len(self._seen) < REQUESTS_MAX:
            self._seen.add(line.request_id)
        sizes = {int(size) for size in line.columns.get("block_size", ()) if size and size >= 1}
        if len(sizes) != 1 or self.id_tokens not in (0, min(sizes)):
            raise TraceError(
                f"line {number}: workers of another block size, whose hashes can't be compared"
            )
        self.id_tokens = min(sizes)
        try:
            prefixes = np.frombuffer(bytes.fromhex(line.prefixes), ">u8").tolist()
        except ValueError as error:
            raise TraceError(f"line {number}: prefixes: {error}") from error
        return {
            "Timestamp": line.at_s,
            "input_tokens": line.prompt_tokens,
            "output_tokens": line.output_tokens or OUTPUT_TOKENS,
            "hash_ids": self._ids(prefixes, line.prompt_tokens, number),
            "model": line.model,
        }

    def _ids(self, prefixes: list[int], prompt_tokens: int, number: int) -> list[int]:
        """An id for each block of a prompt. A block without a hash gets an id that no other line
        has: a last block that is not full, and all blocks of a prompt whose tokens are unknown."""
        needed = -(-prompt_tokens // self.id_tokens)
        ids, own = prefixes[:needed], number << 32
        return ids + list(range(own, own + needed - len(ids)))
