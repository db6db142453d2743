"""Requests of a router's decision log, as rows of a trace: what other policies, other numbers of
engines or other caches would have made of the traffic that was recorded.

A line needs the hashes of its prompt (`decision_log.hashes`). Output tokens are what the request
expected, its `max_tokens` at a gateway; the log does not know what came.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from router.observe.audit.logged_decision import LoggedDecision
from simulator.traffic.trace_columns import TraceError

OUTPUT_TOKENS = 256
"""Output tokens of a request that expected no number."""

_SIGN = "overlap_tokens"
"""Column that every line of a decision has, and no trace."""


class LoggedTrace:
    """The lines of one log."""

    def __init__(self) -> None:
        self.id_tokens = 0
        """Tokens of each of `hash_ids`: the block size of the first line's workers."""

    @staticmethod
    def is_logged(cells: Mapping[str, Any]) -> bool:
        """Whether a line is of a decision log: of a pick, or of a refusal after a decision."""
        return _SIGN in cells or _SIGN in (cells.get("decision") or ())

    def cells(self, logged: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A request's cells, by names of simulator/traffic/trace_columns.py; raises TraceError."""
        try:
            line = msgspec.convert(logged.get("decision") or logged, LoggedDecision)
        except msgspec.ValidationError as error:
            raise TraceError(f"line {number}: no line of a decision log: {error}") from error
        if line.prefixes is None:
            raise TraceError(
                f"line {number}: the line has no hashes of its prompt: decision_log.hashes was off"
            )
        sizes = {int(size) for size in line.columns.get("block_size", ()) if size}
        if len(sizes) != 1 or self.id_tokens not in (0, min(sizes)):
            raise TraceError(f"line {number}: workers of another block size")
        self.id_tokens = min(sizes)
        ids = np.frombuffer(bytes.fromhex(line.prefixes), ">u8").tolist()
        if line.prompt_tokens % self.id_tokens:
            ids.append(number)  # of the last block, which is not full and so nobody else's
        return {
            "Timestamp": line.at_s,
            "input_tokens": line.prompt_tokens,
            "output_tokens": line.output_tokens or OUTPUT_TOKENS,
            "hash_ids": ids,
            "model": line.model,
        }
