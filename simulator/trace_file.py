"""Reads trace files. Which of three forms a file has is told by its content.

- Mooncake's: a JSON object a line, with `timestamp` (ms), `input_length`, `output_length` (tokens)
  and `hash_ids`, one for each 512 prompt tokens, the last one perhaps partial.
- The same with `session_id`, `turn`, `think_ms`: agents, whose turn starts `think_ms` after the one
  before it ended. Its timestamp only says where the recording had it.
- CSV with a header: `arrival_s` or `timestamp_ms`, `input_length`, `output_length`. Prompts share
  nothing, but for what these columns tell: `session_id` (each prompt goes on where the session's
  longest one so far ended; with `think_ms`, closed loop as above), and `prefix_id` with
  `prefix_tokens` (the prompt begins with these tokens of a common text; whole 512s are shared).

Other fields are ignored. Blank lines are skipped. Lines are in order of time.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from simulator.trace import ID_TOKENS, Trace, TraceRequest

SLICES = {
    name: Path(__file__).parent / "data" / file
    for name, file in {
        "conversation": "mooncake_conversation_slice.jsonl",
        "synthetic": "mooncake_synthetic_slice.jsonl",
        "agentic": "claude_code_agentic_slice.jsonl",
    }.items()
}
"""The slices of public traces that ship with the project; data/README.md tells their origin."""

_U64_MAX = (1 << 64) - 1


class TraceError(ValueError):
    """A line that is no request, with its number; or a file that is no trace."""


Text = Annotated[str, Meta(min_length=1)]
NotNegative = Annotated[float, Meta(ge=0, le=1e15)]
# No prompt is that long: a mistake shall be told before the memory is full of its ids.
PromptTokens = Annotated[int, Meta(ge=1, le=100_000_000)]
OutputTokens = Annotated[int, Meta(ge=0, le=100_000_000)]


class _JsonLine(msgspec.Struct, frozen=True):
    """One request as a JSON line tells it."""

    timestamp: NotNegative
    """ms since the trace began"""
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[Annotated[int, Meta(ge=0)]]
    session_id: Text | int | None = None
    turn: Annotated[int, Meta(ge=0)] | None = None
    think_ms: NotNegative | None = None


class _CsvRow(msgspec.Struct, frozen=True):
    """One request as a CSV row tells it; empty cells are absent."""

    input_length: PromptTokens
    output_length: OutputTokens
    arrival_s: NotNegative | None = None
    timestamp_ms: NotNegative | None = None
    session_id: Text | None = None
    turn: Annotated[int, Meta(ge=0)] | None = None
    think_ms: NotNegative | None = None
    prefix_id: Text | None = None
    prefix_tokens: Annotated[int, Meta(ge=0)] = 0


def load_trace(trace: str | Path) -> Trace:
    """A file's requests, or those of a slice that ships, by its name.

    Raises TraceError, with the file's name and the line's number.
    """
    path = SLICES.get(str(trace), Path(trace))
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return Trace(path.stem, tuple(read_trace(lines)))
    except OSError as error:
        raise TraceError(
            f"{trace}: {error.strerror}; the slices that ship are {', '.join(SLICES)}"
        ) from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is no text: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def read_trace(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yields a trace's requests, as recorded. Raises TraceError, with the line's number."""
    numbered = iter(enumerate(lines, 1))
    for number, line in numbered:
        if line.strip():
            parse = _json_requests if line.lstrip()[0] in "{[" else _csv_requests
            yield from _in_order(parse(chain([(number, line)], numbered)))
            return


def _json_requests(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, TraceRequest]]:
    decoder = msgspec.json.Decoder(_JsonLine)
    for number, text in lines:
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.ValidationError as error:
            raise TraceError(f"line {number}: {_mistake(error)}") from error
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number}: no JSON: {error}") from error
        ids_needed = -(-line.input_length // ID_TOKENS)
        if len(line.hash_ids) != ids_needed:
            raise TraceError(
                f"line {number}: input_length {line.input_length} needs {ids_needed} hash_ids of "
                f"{ID_TOKENS} tokens, but there are {len(line.hash_ids)}"
            )
        if max(line.hash_ids) > _U64_MAX:
            raise TraceError(f"line {number}: a hash id has more than 64 bits")
        yield (
            number,
            TraceRequest(
                arrival_s=line.timestamp / 1e3,
                prompt_tokens=line.input_length,
                output_tokens=max(1, line.output_length),
                hash_ids=np.array(line.hash_ids, np.uint64),
                session_id=None if line.session_id is None else str(line.session_id),
                turn=line.turn or 0,
                think_s=None if line.think_ms is None else line.think_ms / 1e3,
            ),
        )


@dataclass(slots=True)
class _Texts:
    """Ids for the texts of a CSV file: of prefixes, of sessions, of everything else."""

    _fresh: Iterator[int] = field(default_factory=count)
    _texts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def ids(self, row: _CsvRow) -> list[int]:
        id_count = -(-row.input_length // ID_TOKENS)
        prefix: list[int] = []
        if row.prefix_id is not None:
            shared = min(row.prefix_tokens, row.input_length) // ID_TOKENS
            prefix = self._begin(self._texts.setdefault(("prefix", row.prefix_id), []), shared)
        if row.session_id is None:
            return self._begin(prefix, id_count)
        return self._begin(self._texts.setdefault(("session", row.session_id), prefix), id_count)

    def _begin(self, text: list[int], id_count: int) -> list[int]:
        """The first ids of a text, which grows to that length."""
        text.extend(islice(self._fresh, max(0, id_count - len(text))))
        return text[:id_count]


def _csv_requests(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, TraceRequest]]:
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for number, text in lines:  # noqa: B007  # told to the reader of the rows
            yield text

    rows = csv.reader(texts(), strict=True)
    known = _Texts()
    try:
        header = [name.strip() for name in next(rows)]
        _check_header(header, number)
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise TraceError(
                    f"line {number}: {len(cells)} cells, but the header has {len(header)}"
                )
            told = zip(header, map(str.strip, cells), strict=True)
            row = msgspec.convert(
                {name: cell for name, cell in told if cell}, _CsvRow, strict=False
            )
            yield number, _csv_request(row, number, known)
    except msgspec.ValidationError as error:
        raise TraceError(f"line {number}: {_mistake(error)}") from error
    except csv.Error as error:
        raise TraceError(f"line {number}: {error}") from error


def _check_header(header: list[str], number: int) -> None:
    missing = [name for name in ("input_length", "output_length") if name not in header]
    if not {"arrival_s", "timestamp_ms"} & set(header):
        missing.append("arrival_s (or timestamp_ms)")
    if missing:
        raise TraceError(
            f"line {number}: neither JSON nor a CSV header with {', '.join(missing)}:"
            f" {','.join(header)[:100]!r}"
        )


def _csv_request(row: _CsvRow, number: int, known: _Texts) -> TraceRequest:
    if row.arrival_s is not None:
        arrival_s = row.arrival_s
    elif row.timestamp_ms is not None:
        arrival_s = row.timestamp_ms / 1e3
    else:
        raise TraceError(f"line {number}: neither arrival_s nor timestamp_ms")
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=row.input_length,
        output_tokens=max(1, row.output_length),
        hash_ids=np.array(known.ids(row), np.uint64),
        session_id=row.session_id,
        turn=row.turn or 0,
        think_s=None if row.think_ms is None else row.think_ms / 1e3,
    )


def _mistake(error: msgspec.ValidationError) -> str:
    """Its field first, as in `input_length: expected int >= 1`."""
    what, _, field_path = str(error).replace("`", "").partition(" - at $.")
    return f"{field_path}: {what[0].lower()}{what[1:]}" if field_path else what


def _in_order(requests: Iterable[tuple[int, TraceRequest]]) -> Iterator[TraceRequest]:
    """Checks that time and turns go forward, and lets a session begin with its first turn."""
    previous_s = 0.0
    turns: dict[str, int] = {}
    for number, request in requests:
        if request.arrival_s < previous_s:
            raise TraceError(
                f"line {number}: its time, {request.arrival_s:g} s, is before the last one's, "
                f"{previous_s:g} s"
            )
        previous_s = request.arrival_s
        session_id = request.session_id
        if session_id is not None:
            last_turn = turns.get(session_id)
            if last_turn is not None and request.turn < last_turn:
                raise TraceError(
                    f"line {number}: turn {request.turn} of session {session_id!r} comes after its"
                    f" turn {last_turn}"
                )
            turns[session_id] = request.turn
            if last_turn is None:
                yield replace(request, think_s=None)
                continue
        yield request
