"""Requests and answers of Anthropic's messages in vLLM's form: POST /v1/messages. Pure.

As in vLLM 0.32: `usage.input_tokens` leaves out the cached tokens, which `cache_read_input_tokens`
has; a stream begins with message_start, whose input_tokens are those of the whole prompt, and its
message_delta has the usage.
"""

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
from simulator.live.engine import Completion
from simulator.live.tool_calls import ForcedCall, Function, UnfitChoice, forced_call


class MessagesTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(msgspec.Struct):
    type: str
    name: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[ContentPart] | None = None

    def token_ids(self) -> list[int]:
        return _token_ids(self.system, self.messages)


class MessagesRequest(GenerationRequest, kw_only=True):
    """POST /v1/messages."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: str | list[ContentPart] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None

    def token_ids(self) -> list[int]:
        return _token_ids(self.system, self.messages)

    def call(self) -> ForcedCall | None:
        """The tool call that the request forces; None: the answer is a text. Raises UnfitChoice."""
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return None
        if choice.type not in ("any", "tool") or (choice.type == "tool") != bool(choice.name):
            raise UnfitChoice("tool_choice must be auto, any, none, or tool with a name")
        functions = [Function(tool.name, tool.input_schema) for tool in self.tools or ()]
        return forced_call(functions, choice.name)

    def limit(self) -> tuple[int, str]:
        """Tokens of the answer, at most CHAT_TOKENS of text, since a real model would stop by
        itself; and its stop_reason."""
        call = self.call()
        needed = CHAT_TOKENS if call is None else len(call.arguments)
        if needed > self.max_tokens:
            return self.max_tokens, "max_tokens"
        return needed, "end_turn" if call is None else "tool_use"


class MessagesReply:
    """Writes one answer in the form of Anthropic's messages: whole, or in events of a stream."""

    def __init__(self, request: MessagesRequest, model: str, request_id: str | None) -> None:
        self._id = f"chatcmpl-{request_id or uuid4().hex}"
        self._model = model
        self._stop_reason = request.limit()[1]
        self._prompt_tokens = len(request.token_ids())
        self._call = request.call()
        self._sent = 0
        """Characters of the tool call's arguments that are written."""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        block = self._block()
        if self._call is None:
            block["text"] = detokenize(completion.token_ids)
        elif self._stop_reason == "tool_use":
            block["input"] = msgspec.json.decode(self._call.arguments)
        return self._message([block], self._stop_reason, usage(completion))

    def chunk(self, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """The events with the next tokens of a stream."""
        delta: dict[str, Any]
        if self._call is None:
            delta = {"type": "text_delta", "text": detokenize(token_ids)}
        else:
            part = self._call.arguments[self._sent : self._sent + len(token_ids)]
            self._sent += len(token_ids)
            delta = {"type": "input_json_delta", "partial_json": part}
        events = [event("content_block_delta", index=0, delta=delta)]
        if first:
            begun = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            events[:0] = [
                event("message_start", message=self._message([], None, begun)),
                event("content_block_start", index=0, content_block=self._block()),
            ]
        if last:
            events.append(event("content_block_stop", index=0))
        return b"".join(events)

    def end(self, completion: Completion) -> bytes:
        """The events after the last tokens of a stream: the usage and the end."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        return event("message_delta", delta=delta, usage=usage(completion)) + event("message_stop")

    def _block(self) -> dict[str, Any]:
        """The answer's only content block, still empty: text, or the forced tool call."""
        if self._call is None:
            return {"type": "text", "text": ""}
        return {
            "type": "tool_use",
            "id": f"toolu_{self._id[-24:]}",
            "name": self._call.name,
            "input": {},
        }

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }


def _token_ids(system: str | list[ContentPart] | None, messages: list[Message]) -> list[int]:
    first = [] if system is None else [Message("system", system)]
    return tokenize(chat_text([*first, *messages]))


def usage(completion: Completion) -> dict[str, int]:
    """The usage of an answer; the cached tokens are not among the input tokens."""
    return {
        "input_tokens": completion.prompt_tokens - completion.cached_tokens,
        "output_tokens": len(completion.token_ids),
        "cache_read_input_tokens": completion.cached_tokens,
    }


def messages_refusal(kind: str, message: str) -> dict[str, Any]:
    """The body of an error in Anthropic's form."""
    return {"type": "error", "error": {"type": kind, "message": message}}
