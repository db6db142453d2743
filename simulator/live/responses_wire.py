"""Requests and answers of OpenAI's responses in vLLM's form: POST /v1/responses. Pure.

A stand-in engine stores no response, so a request with previous_response_id is refused.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta

from simulator.live.completion_wire import (
    CHAT_TOKENS,
    ContentPart,
    GenerationRequest,
    Message,
    chat_text,
    detokenize,
    event,
    tokenize,
)
from simulator.live.engine import Completion, RequestRefused


class Item(msgspec.Struct):
    """An item of a request's input: a message, a tool's call or its output, or reasoning."""

    type: str | None = None
    role: str = ""
    content: str | list[ContentPart] | None = None
    name: str = ""
    arguments: str = ""
    input: str = ""
    output: str | list[ContentPart] = ""

    def message(self) -> Message:
        """The item as a message of a chat."""
        if self.type in ("function_call", "custom_tool_call"):
            return Message("assistant", f"{self.name}{self.arguments}{self.input}")
        if self.type in ("function_call_output", "custom_tool_call_output"):
            return Message("tool", self.output)
        return Message(self.role or "assistant", self.content)


class ResponsesRequest(GenerationRequest, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    previous_response_id: str | None = None

    def token_ids(self) -> list[int]:
        """Tokens of the prompt. Raises RequestRefused for a request with previous_response_id."""
        if self.previous_response_id is not None:
            raise RequestRefused(
                f"no response is stored here: previous_response_id {self.previous_response_id}"
            )
        first = [Message("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return tokenize(chat_text([*first, Message("user", self.input)]))
        return tokenize(chat_text([*first, *(item.message() for item in self.input)]))

    def limit(self) -> tuple[int, str]:
        """Tokens of the answer, at most CHAT_TOKENS, since a real model would stop by itself; and
        its status."""
        if self.max_output_tokens is None or self.max_output_tokens >= CHAT_TOKENS:
            return CHAT_TOKENS, "completed"
        return self.max_output_tokens, "incomplete"


class ResponsesReply:
    """Writes one answer in the form of OpenAI's responses: whole, or in events of a stream."""

    def __init__(self, request: ResponsesRequest, model: str, request_id: str | None) -> None:
        name = request_id or uuid4().hex
        self._id, self._item_id = f"resp_{name}", f"msg_{name}"
        self._created = int(time.time())
        self._model = model
        self._status = request.limit()[1]
        self._number = 0
        self._text: list[str] = []

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return self._response(self._status, detokenize(completion.token_ids), usage(completion))

    def chunk(self, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """The events with the next tokens of a stream."""
        text, place = detokenize(token_ids), self._place
        self._text.append(text)
        events = b""
        if first:
            begun = self._response("in_progress", None, None)
            events += self._event("response.created", response=begun)
            events += self._event("response.in_progress", response=begun)
            item = self._item("in_progress", None)
            events += self._event("response.output_item.added", output_index=0, item=item)
            events += self._event("response.content_part.added", **place, part=_part(""))
        events += self._event("response.output_text.delta", **place, delta=text, logprobs=[])
        if last:
            whole = "".join(self._text)
            events += self._event("response.output_text.done", **place, text=whole, logprobs=[])
            events += self._event("response.content_part.done", **place, part=_part(whole))
            item = self._item("completed", whole)
            events += self._event("response.output_item.done", output_index=0, item=item)
        return events

    def end(self, completion: Completion) -> bytes:
        """The event after the last tokens of a stream, with the whole response."""
        response = self._response(self._status, "".join(self._text), usage(completion))
        return self._event(f"response.{self._status}", response=response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **about: Any) -> bytes:
        self._number += 1
        return event(kind, sequence_number=self._number - 1, **about)

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if text is None else [_part(text)],
        }

    def _response(
        self, status: str, text: str | None, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "incomplete_details": details,
            "model": self._model,
            "output": [] if text is None else [self._item("completed", text)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


def usage(completion: Completion) -> dict[str, Any]:
    """The usage of an answer: the cached tokens are among the input tokens."""
    answered = len(completion.token_ids)
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": completion.prompt_tokens + answered,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
