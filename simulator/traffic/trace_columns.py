"""Columns of trace files: the names in public traces, their units, and the checks of a cell.

The first name for a field is the file's column for it. Every other column is not read, and
`TraceColumns.uses` lists each of them.

Sources of the names, read 2026-11-22: kvcache-ai/Mooncake, FAST25-release; Azure's
AzurePublicDataset, LLM inference 2023 and 2024, LMM inference 2025; microsoft/vidur, processed
Azure traces (arrived_at); HPMLL/BurstGPT, releases 1.1 and 2.0; AIPerf's guide to the traces of
alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from math import isfinite, nan
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from simulator.traffic.trace import ColumnUse

CLOCK_S_MAX = 1e12
UNREAD_MAX = 100
"""Names of unread columns that are kept; a file of JSON may have new columns on every line."""


class TraceError(ValueError):
    """A line that is not a request, with its number and column; or a file that is not a trace."""


Text = Annotated[str, Meta(min_length=1, max_length=1024)]
"""A text, at most as long as a router accepts."""
_Time = Annotated[float, Meta(ge=0, le=1e15)]
# No prompt is longer: a mistake is reported before its ids fill the memory.
PromptTokens = Annotated[int, Meta(ge=1, le=100_000_000)]
_Count = Annotated[int, Meta(ge=0, le=100_000_000)]
_Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
_Ids = list[Annotated[int, Meta(ge=0)]]


class Column(NamedTuple):
    """The field of a request that a column of a trace file gives, and the unit of its values."""

    field: str
    """Field of a TraceRequest, or of its text or chat."""
    type: Any
    meaning: str
    per_second: float = 1.0
    """The column's units in a second, for times."""
    is_clock: bool = False
    """Seconds, or a date and time, with any origin: the first row's time counts as 0."""


Row = dict[str, Any]
"""Field -> value of a request's cells: fields of TraceRequest, and those of its text and chat."""

_NO_IDS = "none: prompts share no text except within a session or prefix"
_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")

_SECONDS = Column("arrival_s", _Time, "arrival, in seconds")
_MILLISECONDS = Column("arrival_s", _Time, "arrival, in milliseconds", 1e3)
_CLOCK = Column(
    "arrival_s", Any, "arrival, in seconds or as date and time, counted from the first row",
    is_clock=True,
)  # fmt: skip
_PROMPT = Column("prompt_tokens", PromptTokens, "prompt tokens")
_OUTPUT = Column("output_tokens", _Count, "output tokens; 0 counts as 1")
_SESSION = Column("session_id", Text, "session; without hash_ids its prompts begin alike")
_TENANT = Column("tenant", Text, "tenant, for the router's queue")
_MODEL = Column("model", Text, "model; every engine serves all models, which share no KV cache")
_LORA = Column("lora_name", Text, "LoRA; every engine has all LoRAs, which share no KV cache")
_DEADLINE = "deadline of the answer after the arrival, for the router's queue and goodput"
_SLO = "that counts as good, for the router and goodput"

COLUMNS: dict[str, Column] = {
    "arrival_s": _SECONDS,
    "arrived_at": _SECONDS,  # Azure's, as processed for Vidur
    "timestamp_ms": _MILLISECONDS,
    "timestamp": _MILLISECONDS,  # Mooncake's
    "Timestamp": _CLOCK,  # BurstGPT's: seconds, of which the first is up to 19,440,110
    "TIMESTAMP": _CLOCK,  # Azure's: 2023-11-16 18:17:03.9799600
    "input_length": _PROMPT,
    "input_tokens": _PROMPT,
    "num_prefill_tokens": _PROMPT,
    "ContextTokens": _PROMPT,
    "Request tokens": _PROMPT,
    "output_length": _OUTPUT,
    "output_tokens": _OUTPUT,
    "num_decode_tokens": _OUTPUT,
    "GeneratedTokens": _OUTPUT,
    "Response tokens": _OUTPUT,
    "hash_ids": Column("hash_ids", _Ids, "text of the prompt, an id for each block of the trace"),
    "session_id": _SESSION,
    "Session ID": _SESSION,
    "turn": Column("turn", _Count, "turn of the session"),
    "think_ms": Column(
        "think_s", _Time, "pause after the session's previous turn, in milliseconds", 1e3
    ),
    "prefix_id": Column("prefix_id", Text, "common text at the beginning of the prompt"),
    "prefix_tokens": Column("prefix_tokens", _Count, "tokens of that common text"),
    "priority": Column(
        "priority", _Priority, "priority, higher is sooner, for the router's queue and for engines"
    ),
    "tenant": _TENANT,
    "model": _MODEL,
    "Model": _MODEL,
    "lora_name": _LORA,
    "lora": _LORA,
    "deadline_ms": Column("deadline_s", _Time, f"{_DEADLINE}; in milliseconds", 1e3),
    "deadline_s": Column("deadline_s", _Time, f"{_DEADLINE}; in seconds"),
    "ttft_slo_ms": Column("ttft_slo_s", _Time, f"TTFT {_SLO}; in milliseconds", 1e3),
    "tpot_slo_ms": Column("tpot_slo_s", _Time, f"time between tokens {_SLO}; in milliseconds", 1e3),
}
"""Name in a file -> its meaning. Case matters, since BurstGPT's `Timestamp` and Mooncake's
`timestamp` have different units."""

_BAILIAN: dict[str, Column | None] = {
    "timestamp": _SECONDS,
    "turn": None,  # a chat may branch, and the branches come in any order
    "chat_id": Column("chat", Text, "chat; the first chat of a chain names the session"),
    "parent_chat_id": Column("parent_chat", Text, "chat that this chat continues; -1: none"),
}
"""Names with another meaning in a file that has a column `chat_id` (Bailian's); None: not read."""


class TraceColumns:
    """The columns of a file. `first`: the names in its first row or header."""

    def __init__(self, first: Collection[str], *, cells_are_text: bool) -> None:
        self._table: Mapping[str, Column | None] = COLUMNS
        if "chat_id" in first:
            self._table = COLUMNS | _BAILIAN
        if cells_are_text:  # no list of ids
            self._table = {**self._table, "hash_ids": None}
        self._cells_are_text = cells_are_text
        self._read: dict[str, Column] = {}
        self._names: dict[str, str] = {}
        """Field -> the file's column for it."""
        self._unread: dict[str, str] = {}
        """Name -> why the column isn't read."""
        self._more_unread = False
        self._clock_began_s: float | None = None
        for name in first:
            self._see(name)
        self.has_ids = "hash_ids" in self._names
        """Whether prompts are given as ids of their text, either all or none."""

    @property
    def missing(self) -> list[str]:
        """Possible names of each required field that has no column so far."""
        return [_names_of(field) for field in _REQUIRED if field not in self._names]

    def uses(self) -> tuple[ColumnUse, ...]:
        """The meaning of each column; unread columns last."""
        uses = [ColumnUse(name, column.meaning) for name, column in self._read.items()]
        uses += [ColumnUse(name, why, is_read=False) for name, why in self._unread.items()]
        if not self.has_ids and "hash_ids" not in self._unread:
            uses.append(ColumnUse("hash_ids", _NO_IDS, is_read=False))
        if self._more_unread:
            uses.append(ColumnUse("...", f"more than {UNREAD_MAX} are not read", is_read=False))
        return tuple(uses)

    def name_of(self, field: str) -> str:
        """The file's column for a field, or the names that it could have."""
        return self._names.get(field) or _names_of(field)

    def row(self, cells: Iterable[tuple[str, Any]], number: int) -> Row:
        """A request from pairs of name and cell, where None or an empty text is no cell.

        Raises TraceError, with the line's number and the column.
        """
        fields: Row = {}
        for name, cell in cells:
            column = self._read.get(name) or self._see(name)
            if column is None or cell is None or cell == "":
                continue
            try:
                fields[column.field] = self._value(column, cell)
            except (msgspec.ValidationError, ValueError) as error:
                raise TraceError(_bad_cell(number, name, cell, error)) from error
        for field in _REQUIRED:
            if field not in fields:
                raise TraceError(
                    f"line {number}, column {self.name_of(field)}: is empty or missing"
                )
        if self.has_ids != ("hash_ids" in fields):
            mistake = "is empty or missing" if self.has_ids else "is not in the first row"
            raise TraceError(f"line {number}, column hash_ids: {mistake}")
        return fields

    def _see(self, name: str) -> Column | None:
        """The column of a name; decides about a name that is new."""
        if name in self._unread:
            return None
        column = self._table.get(name)
        if column is not None and column.field not in self._names:
            self._names[column.field] = name
            self._read[name] = column
            return column
        if len(self._unread) == UNREAD_MAX:
            self._more_unread = True
        elif column is None:
            self._unread[name] = "not read"
        else:
            self._unread[name] = f"not read: {self._names[column.field]!r} has the same"
        return None

    def _value(self, column: Column, cell: Any) -> Any:
        if column.is_clock:
            clock_s = _clock_s(cell)
            if self._clock_began_s is None:
                self._clock_began_s = clock_s
            return clock_s - self._clock_began_s
        if column.type is Text and type(cell) is int:
            cell = str(cell)
        value = msgspec.convert(cell, column.type, strict=not self._cells_are_text)
        return value / column.per_second if column.type is _Time else value


def _names_of(field: str) -> str:
    first, *others = [name for name, column in COLUMNS.items() if column.field == field]
    return f"{first} (or {', '.join(others)})"


def _clock_s(cell: Any) -> float:
    """Seconds of a number, or of a date and time, which is UTC unless it names a zone."""
    try:
        clock_s = float(cell)
    except (OverflowError, TypeError, ValueError):
        clock_s = _date_s(str(cell))
    if not isfinite(clock_s) or abs(clock_s) > CLOCK_S_MAX:
        raise ValueError("expected seconds, or a date and time such as 2023-11-16 18:17:03.97")
    return clock_s


def _date_s(text: str) -> float:
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        return nan


def _bad_cell(number: int, name: str, cell: Any, error: Exception) -> str:
    """The error of a cell, such as `line 3, column input_length: '-4': expected int >= 1`."""
    mistake, _, place = str(error).replace("`", "").partition(" - at $")
    where = f" at {place}" if place else f": {str(cell)[:60]!r}"
    return f"line {number}, column {name}{where}: {mistake[0].lower()}{mistake[1:]}"
