"""Reads an engine's answer while it is passed on: first token, chunks, usage. Pure.

The usage is read from the end of the answer, once. Where the gateway requested the usage chunk of a
stream and the client had not, that chunk is removed.

Laws:
- the bytes that feed() and rest() return are those that came in, less that one chunk;
- nothing is kept but the end of the answer, KEPT_BYTES at most, the first TAIL_BYTES of a message
  or a response, USAGE_BYTES of a usage that stands within a response, and an event of at most
  EVENT_BYTES_MAX whose end has not come; a longer event passes in parts;
- no bytes raise an error: what can't be read counts as absent.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvroute.client.messages.usage import Usage, read_usage
from router.request.bodies import FORMATS, BodyFormat

TAIL_BYTES = 4096
KEPT_BYTES = 4 * TAIL_BYTES
"""Most bytes that are kept of an answer's end, which is cut to TAIL_BYTES when it has more."""
USAGE_BYTES = 1024
EVENT_BYTES_MAX = 1 << 18
USAGES_MAX = 8
"""Most places with the word "usage" that are tried, the last one first."""

_LINE_END = ord("\r")
"""The greater of the two bytes that a line of a stream may end with."""
_EDGE = 96
"""Bytes of a chunk's end that are kept, to find words that two chunks share."""
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.-]{1,200})"')
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*([0-9]{1,15})\b')
_FINISHES = {
    body.finish_field: re.compile(rb'"%b"\s*:\s*"([a-z_]{1,32})"' % body.finish_field.encode())
    for body in FORMATS
    if body.finish_field
}
"""Field that says why an answer ended, behind its content -> pattern of the field and its value. A
generated text can't match, since quotes in it are escaped."""
_REASONS = (
    rb'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"(max_output_tokens|content_filter)"'
    rb'|"type"\s*:\s*"(function_call|custom_tool_call)"'
)
_WORDS = {
    True: re.compile(_REASONS + rb"|\nevent: ?response\.(completed|failed)\b"),
    False: re.compile(_REASONS + rb'|"status"\s*:\s*"(completed|failed|cancelled)"'),
}
"""Whether the answer is a stream -> pattern of BodyFormat.finish_words. In a stream a failure is an
event's line, which no text of the request can imitate, since JSON texts have no line breaks."""
_USAGES = {
    body.usage_within: re.compile(rb'"usage"\s*:\s*\{\s*"%b"' % body.usage_within.encode())
    for body in FORMATS
    if body.usage_within
}
_BEGIN = re.compile(rb'"usage"\s*:\s*\{')
_decoder = json.JSONDecoder()


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, Any] | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


_chunk = msgspec.json.Decoder(_Chunk)
_error = msgspec.json.Decoder(_ErrorEvent)


class AnswerReader:
    """Reads one answer while it is passed on."""

    def __init__(self, kind: BodyFormat, *, is_stream: bool, takes_usage_out: bool = False) -> None:
        """kind: the request's format. is_stream: the answer is a stream of events. takes_usage_out:
        the chunk with the usage, which the client did not request, is removed.
        """
        self.first_token = False
        """Whether bytes have come that an engine sends only once it has the first token."""
        self.passed = False
        """Whether a byte was passed on, so that no other worker can be tried."""
        self.chunks = 0
        """Events of a stream so far, which usually have a token each; 1 for an answer that is no
        stream."""
        self._kind = kind
        self.is_stream = is_stream
        self._takes_out = takes_usage_out and is_stream
        self._keeps_head = kind.is_continued or (kind.usage_begins and is_stream)
        self._event_end = b"\n\n"
        self._held = b""
        """The beginning of an event whose end has not come."""
        self._in_long_event = False
        self._edge = b""
        self._head = b""
        self._tail = bytearray()
        self._within = _USAGES.get(kind.usage_within)
        self._words = _WORDS[is_stream] if kind.finish_words else None
        self._seen: set[str] = set()
        """The format's finish_words that the answer has so far."""
        self._within_edge = b"\n"
        self._near = b""
        """USAGE_BYTES from the beginning of the last usage on; empty: none has begun."""
        self._usage: Mapping[str, Any] | None = None
        """Usage of the chunk that was removed; None: no chunk was."""

    def feed(self, chunk: bytes) -> bytes:
        """Reads a chunk of the answer; returns the bytes to pass on now: none while an event is
        incomplete that may have to be removed."""
        if not self.first_token:
            self._look(chunk)
        if self._within is not None or self._words is not None:
            self._look_within(chunk)
        if self._takes_out:
            chunk = self._without_usage(chunk)
        if chunk:
            self.passed = True
            if self.is_stream:
                if not self.chunks and b"\r" in chunk:  # its lines end so: no JSON has one
                    self._event_end = b"\r\n\r\n"
                self.chunks += chunk.count(self._event_end)
                if chunk[0] <= _LINE_END:
                    self.chunks += self._ends_event(chunk)
        tail = self._tail
        tail += chunk if len(chunk) <= TAIL_BYTES else chunk[-TAIL_BYTES:]
        if len(tail) > KEPT_BYTES:
            del tail[:-TAIL_BYTES]
        return chunk

    def rest(self) -> bytes:
        """The bytes still held at the answer's end, to pass on now."""
        held, self._held = self._held, b""
        self.passed |= bool(held)
        return held

    @property
    def inside_event(self) -> bool:
        """Whether the bytes passed on end inside an event."""
        return self.is_stream and bool(self._tail) and not self._tail.endswith(self._event_end)

    def error_status(self) -> int | None:
        """The HTTP status in the error that a stream ends with, which engines send when they can't
        go on; None: it ends with no error."""
        if not self.is_stream:
            return None
        if "failed" in self._seen:
            # SGLang also refuses a request so, whose stream then has no token.
            return 500 if self.first_token else 400
        ending = self._ending()
        place = ending.rfind(b'data: {"error"')
        if place < 0 or (place and ending[place - 1 : place] != b"\n"):
            return None
        if b"\ndata:" in ending[place:].replace(b"\ndata: [DONE]", b""):
            return None  # the engine went on
        try:
            error = _error.decode(ending[place + 5 :].split(b"\n", 1)[0]).error
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return error.code if isinstance(error.code, int) and error.code >= 400 else 500

    def next_number(self) -> int:
        """The sequence_number of the next event of a stream of /v1/responses."""
        numbers = _NUMBER.findall(self._ending())
        return int(numbers[-1]) + 1 if numbers else self.chunks

    def response_id(self) -> str:
        """Id of an answer of /v1/responses, which later requests may name; empty: it has none."""
        named = _RESPONSE_ID.search(self._head or self._ending())
        return named[1].decode() if self._kind.is_continued and named else ""

    def finish_reason(self) -> str:
        """The engine's word for why the answer ended; empty: it says none."""
        if self._words is not None:
            return next((word for word in self._kind.finish_words if word in self._seen), "")
        pattern = _FINISHES.get(self._kind.finish_field)
        said = pattern.findall(self._ending()) if pattern else ()
        return said[-1].decode() if said else ""

    def usage(self) -> Usage:
        """The token usage of the answer; numbers that its bytes don't have are None."""
        last = self._usage or _usage_begun(self._near) or _usage_in(self._ending()) or {}
        usage = read_usage(last, details_enabled=False)
        if self._kind.usage_begins and usage.prompt_tokens is None and self._head:
            first = read_usage(_usage_in(self._head) or {}, details_enabled=False)
            cached = first.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
            usage = Usage(first.prompt_tokens, usage.output_tokens, cached)
        return usage

    def _look_within(self, chunk: bytes) -> None:
        """Looks in a chunk, and across its border with the one before, for finish_words and for a
        usage that further fields may follow; keeps the last usage."""
        seen = self._within_edge + chunk
        if self._words is not None:
            self._seen.update(at[at.lastindex or 0].decode() for at in self._words.finditer(seen))
        places = [] if self._within is None else [at.start() for at in self._within.finditer(seen)]
        if places:
            self._near = seen[places[-1] : places[-1] + USAGE_BYTES]
        elif self._near:
            self._near = (self._near + chunk)[:USAGE_BYTES]
        self._within_edge = seen[-_EDGE:]

    def _ends_event(self, chunk: bytes) -> bool:
        """Whether a chunk begins with the rest of an event's end that the one before began."""
        most = len(self._event_end) - 1
        return self._event_end in self._tail[-most:] + chunk[:most]

    def _ending(self) -> bytes:
        return bytes(self._tail)

    def _look(self, chunk: bytes) -> None:
        """Sets first_token if the chunk shows it; keeps the answer's first TAIL_BYTES."""
        if self._keeps_head and len(self._head) < TAIL_BYTES:
            self._head = (self._head + chunk)[:TAIL_BYTES]
        if not self.is_stream:
            self.first_token, self.chunks = bool(chunk), 1
            return
        seen = self._edge + chunk
        if words := self._kind.first_token:
            self.first_token = any(word in seen for word in words)
        else:
            self.first_token = seen.startswith(b"data:") or b"\ndata:" in seen
        # A space in front: what is left of the edge must not look like a line's beginning.
        self._edge = seen if len(seen) <= _EDGE else b" " + seen[-_EDGE:]

    def _without_usage(self, chunk: bytes) -> bytes:
        if not self._held and chunk.endswith(b"\n\n") and b'"usage"' not in chunk:
            self._in_long_event = False
            return chunk
        data = self._held + chunk
        end = _events_end(data)
        passed, self._held = data[:end], data[end:]
        if len(self._held) > EVENT_BYTES_MAX or (self._in_long_event and not end):
            passed, self._held, self._in_long_event = data, b"", True
            return passed
        long_before, self._in_long_event = self._in_long_event, False
        if b'"usage"' not in passed:
            return passed
        kept = []
        for number, event in enumerate(_events(passed)):
            usage = None if long_before and not number else _usage_alone(event)
            if usage is None:
                kept.append(event)
            else:
                self._usage = usage
        return b"".join(kept)


def _events_end(data: bytes) -> int:
    """Number of bytes up to the end of the last whole event of a stream; 0: no event is whole."""
    ends = [data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data]
    return max(ends, default=0)


def _events(data: bytes) -> list[bytes]:
    mark = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    parts = data.split(mark)
    return [part + mark for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _usage_alone(event: bytes) -> Mapping[str, Any] | None:
    """The usage of an event that holds nothing else; None: any other event."""
    if b'"usage"' not in event or not event.lstrip().startswith(b"data:"):
        return None
    try:
        chunk = _chunk.decode(event.lstrip()[5:])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return chunk.usage if chunk.choices == [] else None


def _usage_in(data: bytes) -> Mapping[str, Any] | None:
    """The last object that a key "usage" has in these bytes of JSON."""
    end = len(data)
    for _ in range(USAGES_MAX):
        place = data.rfind(b'"usage"', 0, end)
        if place < 0:
            return None
        end = place
        value = _usage_begun(data[place:])
        if value is not None:
            return value
    return None


def _usage_begun(data: bytes) -> Mapping[str, Any] | None:
    """The object that is the value of the key "usage" at the beginning of these bytes; None: the
    value is no object, or is cut off."""
    begin = _BEGIN.match(data)
    if begin is None:
        return None
    try:
        value, _ = _decoder.raw_decode(data[begin.end() - 1 :].decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
