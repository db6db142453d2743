"""Reads trace files: JSON with an object per line, or CSV with a header; the first line decides.

Names of columns: simulator/traffic/trace_columns.py. In Mooncake's files, and files of agents with
`session_id`, `turn` and `think_ms`, `hash_ids` name the text of a prompt: an id for each 512 tokens
(or `id_tokens`), the last id perhaps partial. Prompts of other files share text only by these
columns: `session_id` (each prompt continues the session's longest prompt so far) and `prefix_id`
with `prefix_tokens` (the prompt begins with these tokens of a common text; whole ids are shared). A
turn with `think_ms` starts so many milliseconds after the end of the turn before; its arrival is
then only the time in the recording. A router's decision log is a trace, too
(simulator/traffic/logged_trace.py).

Blank lines are skipped. Lines are in order of time.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from simulator.traffic.logged_trace import LoggedTrace
from simulator.traffic.trace import ID_TOKENS, Trace, TraceRequest, served_by
from simulator.traffic.trace_columns import Row, TraceColumns, TraceError

SLICES = {
    name: Path(__file__).parent / "data" / file
    for name, file in {
        "conversation": "mooncake_conversation_slice.jsonl",
        "synthetic": "mooncake_synthetic_slice.jsonl",
        "agentic": "claude_code_agentic_slice.jsonl",
    }.items()
}
"""The slices of public traces in this package; data/README.md names their origin."""

NAMES_MAX = 256
"""Most models, and most LoRAs, of a trace: every engine's heartbeat lists them."""

_U64_MAX = (1 << 64) - 1


def load_trace(trace: str | Path, id_tokens: int = ID_TOKENS) -> Trace:
    """The requests of a file, or of a slice in this package, by its name.

    id_tokens: tokens of each of `hash_ids`. Raises TraceError, with the file's name and the line's
    number.
    """
    path = SLICES.get(str(trace), Path(trace))
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            file = _TraceFile(lines, id_tokens)
            requests = tuple(file.requests())
            return Trace(path.stem, requests, columns=file.columns.uses() if file.columns else ())
    except OSError as error:
        raise TraceError(
            f"{trace}: {error.strerror}; included slices: {', '.join(SLICES)}"
        ) from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not text in UTF-8: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def read_trace(lines: Iterable[str], id_tokens: int = ID_TOKENS) -> Iterator[TraceRequest]:
    """Yields a trace's requests, as recorded. Raises TraceError, with the line's number."""
    return _TraceFile(lines, id_tokens).requests()


class _TraceFile:
    """A trace file that is being read."""

    def __init__(self, lines: Iterable[str], id_tokens: int) -> None:
        self.columns: TraceColumns | None = None
        """None before the first row."""
        self._lines = iter(enumerate(lines, 1))
        self._id_tokens = id_tokens
        self._logged = LoggedTrace()
        self._texts = _Texts(id_tokens)
        self._first_chats: dict[str, str] = {}
        """Chat -> the first chat of its chain."""
        self._names: dict[str, set[str]] = {"model": set(), "lora_name": set()}

    def requests(self) -> Iterator[TraceRequest]:
        """Yields the requests. Raises TraceError."""
        for number, line in self._lines:
            if line.strip():
                rows = self._json_rows if line.lstrip()[0] in "{[" else self._csv_rows
                lines = chain([(number, line)], self._lines)
                yield from self._in_order((at, self._request(row, at)) for at, row in rows(lines))
                return

    def _json_rows(self, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Row]]:
        decoder = msgspec.json.Decoder(dict[str, Any])
        for number, text in lines:
            if not text.strip():
                continue
            try:
                cells = decoder.decode(text)
            except msgspec.ValidationError as error:
                raise TraceError(f"line {number}: expected an object: {error}") from error
            except (msgspec.DecodeError, RecursionError) as error:
                raise TraceError(f"line {number}: not JSON: {error}") from error
            if LoggedTrace.is_logged(cells):
                request = self._logged.cells(cells, number)
                if request is None:
                    continue
                cells, self._id_tokens = request, self._logged.id_tokens
            if self.columns is None:
                self.columns = TraceColumns(cells.keys(), cells_are_text=False)
            yield number, self.columns.row(cells.items(), number)

    def _csv_rows(self, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Row]]:
        number = 0

        def texts() -> Iterator[str]:
            nonlocal number
            for number, text in lines:  # noqa: B007  # for the reader of the rows
                yield text

        rows = csv.reader(texts(), strict=True)
        try:
            header = [name.strip() for name in next(rows)]
            self.columns = columns = _csv_columns(header, number)
            for cells in rows:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    raise TraceError(
                        f"line {number}: {len(cells)} cells, but the header has {len(header)}"
                    )
                named = zip(header, map(str.strip, cells), strict=True)
                yield number, columns.row(named, number)
        except csv.Error as error:
            raise TraceError(f"line {number}: {error}") from error

    def _request(self, row: Row, number: int) -> TraceRequest:
        ids, prefix_id = row.pop("hash_ids", None), row.pop("prefix_id", None)
        prefix_tokens, parent = row.pop("prefix_tokens", 0), row.pop("parent_chat", None)
        if "chat" in row:
            row["session_id"] = self._first_chat(row.pop("chat"), parent)
        for kind in self._names:
            self._remember(kind, row.get(kind), number)
        prompt_tokens, session_id = row["prompt_tokens"], row.get("session_id")
        if ids is None:
            ids = self._texts.ids(prompt_tokens, prefix_id, prefix_tokens, session_id)
        else:
            self._check_ids(ids, prompt_tokens, number)
        row["output_tokens"] = max(1, row["output_tokens"])
        hash_ids = served_by(np.array(ids, np.uint64), row.get("model"), row.get("lora_name"))
        return TraceRequest(hash_ids=hash_ids, id_tokens=self._id_tokens, **row)

    def _in_order(self, requests: Iterable[tuple[int, TraceRequest]]) -> Iterator[TraceRequest]:
        """Checks that time and turns go forward; think times stay where there is a turn before."""
        previous_s = 0.0
        turns: dict[str, int] = {}
        for number, request in requests:
            if request.arrival_s < previous_s:
                raise self._bad(
                    number,
                    "arrival_s",
                    f"{request.arrival_s:.12g} s is before the last request, {previous_s:.12g} s",
                )
            previous_s = request.arrival_s
            session_id = request.session_id
            last_turn = turns.get(session_id) if session_id is not None else None
            if last_turn is not None and request.turn < last_turn:
                raise self._bad(
                    number,
                    "turn",
                    f"turn {request.turn} of session {session_id!r} comes after its turn"
                    f" {last_turn}",
                )
            if session_id is not None:
                turns[session_id] = request.turn
            if last_turn is None and request.think_s is not None:
                request = replace(request, think_s=None)
            yield request

    def _bad(self, number: int, field: str, mistake: str) -> TraceError:
        column = field if self.columns is None else self.columns.name_of(field)
        return TraceError(f"line {number}, column {column}: {mistake}")

    def _remember(self, field: str, name: str | None, number: int) -> None:
        """Remembers the name of a model or LoRA; raises TraceError for more than NAMES_MAX
        names."""
        names = self._names[field]
        if name is not None and name not in names:
            if len(names) == NAMES_MAX:
                raise self._bad(
                    number,
                    field,
                    f"{name!r} is one too many: {NAMES_MAX} different names are allowed",
                )
            names.add(name)

    def _first_chat(self, chat: str, parent: str | None) -> str:
        first = chat if parent in (None, "-1") else self._first_chats.get(parent, parent)
        self._first_chats[chat] = first
        return first

    def _check_ids(self, ids: list[int], prompt_tokens: int, number: int) -> None:
        ids_needed = -(-prompt_tokens // self._id_tokens)
        if len(ids) != ids_needed:
            fitting = _fitting_id_tokens(prompt_tokens, len(ids))
            raise self._bad(
                number,
                "hash_ids",
                f"a prompt of {prompt_tokens} tokens needs {ids_needed} ids of {self._id_tokens}"
                f" tokens, but there are {len(ids)}"
                + (f"; --trace-block-size {fitting} would fit" if fitting else ""),
            )
        if max(ids) > _U64_MAX:
            raise self._bad(number, "hash_ids", "an id has more than 64 bits")


@dataclass(slots=True)
class _Texts:
    """Makes the ids of prompts for a file without hash_ids: prompts of one prefix or session begin
    with the same ids; all other ids are new."""

    id_tokens: int
    _fresh: Iterator[int] = field(default_factory=count)
    _texts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def ids(
        self, tokens: int, prefix_id: str | None, prefix_tokens: int, session_id: str | None
    ) -> list[int]:
        id_count = -(-tokens // self.id_tokens)
        prefix: list[int] = []
        if prefix_id is not None:
            shared = min(prefix_tokens, tokens) // self.id_tokens
            prefix = self._begin(self._texts.setdefault(("prefix", prefix_id), []), shared)
        if session_id is None:
            return self._begin(prefix, id_count)
        return self._begin(self._texts.setdefault(("session", session_id), prefix), id_count)

    def _begin(self, text: list[int], id_count: int) -> list[int]:
        """The first `id_count` ids of a text, which new ids extend to that length."""
        text.extend(islice(self._fresh, max(0, id_count - len(text))))
        return text[:id_count]


def _csv_columns(header: list[str], number: int) -> TraceColumns:
    """The columns of a CSV header. Raises TraceError for a line that is no header, or lacks a
    column."""
    columns = TraceColumns(header, cells_are_text=True)
    if columns.missing:
        wanted = " and ".join(columns.missing)
        raise TraceError(
            f"line {number}: expected JSON, or a CSV header with a column {wanted},"
            f" got {','.join(header)[:100]!r}"
        )
    twice = [name for name, times in Counter(header).items() if name and times > 1]
    if twice:
        raise TraceError(f"line {number}: the header has {twice[0]!r} more than once")
    return columns


def _fitting_id_tokens(prompt_tokens: int, id_count: int) -> int | None:
    sizes = (1 << bits for bits in range(3, 17))
    return next((size for size in sizes if -(-prompt_tokens // size) == id_count), None)
