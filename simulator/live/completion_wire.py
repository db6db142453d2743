"""Requests and answers in vLLM's OpenAI-style form: the fields that routers' clients use. Pure.

The tokenizer is a toy: one token a UTF-8 byte. Fields that are not named here, such as temperature,
are ignored.
"""

import time
from collections.abc import Sequence
from math import inf
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta

from simulator.live.engine import Completion
from simulator.live.tool_calls import ForcedCall, Function, UnfitChoice, forced_call

COMPLETION_TOKENS = 16
"""Tokens of a completion without max_tokens, as in vLLM."""
CHAT_TOKENS = 256
"""Tokens of a chat answer without a limit: a real model stops by itself."""

TokenIds = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that requests of every API have: completions, chats, messages and responses."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    return_token_ids: bool = False
    bootstrap_host: str | None = None
    """Address of the prefill engine's bootstrap server, and number of a room there (rooms.py):
    SGLang's fields of a request that a prefill and a decode engine serve."""
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | TokenIds

    def token_ids(self) -> list[int]:
        return tokenize(self.prompt) if isinstance(self.prompt, str) else self.prompt

    def limit(self) -> tuple[int, str]:
        """Tokens of the answer, and its finish reason."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, "length"

    def call(self) -> None:
        """No call: a completion calls no tool."""


class ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None

    def text(self) -> str:
        """The text of all parts; other parts, such as images, are left out."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Tool(msgspec.Struct):
    """A function that the answer may call."""

    function: Function


class ChosenFunction(msgspec.Struct):
    name: str


class ToolChoice(msgspec.Struct):
    """The function that the answer must call."""

    function: ChosenFunction


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None

    def token_ids(self) -> list[int]:
        return tokenize(chat_text(self.messages))

    def limit(self) -> tuple[int, str]:
        """Tokens of the answer, and its finish reason; max_completion_tokens overrides max_tokens,
        as in vLLM. A tool call ends with its arguments; its finish reason is "tool_calls", or, as
        in vLLM, "stop" if the request named the function. Raises UnfitChoice."""
        call = self.call()
        needed = inf if call is None else len(call.arguments)
        overrides = self.max_completion_tokens is not None
        most = self.max_completion_tokens if overrides else self.max_tokens
        if most is not None and most < needed:
            return most, "length"
        if call is None:
            return CHAT_TOKENS, "stop"
        return len(call.arguments), "stop" if call.is_named else "tool_calls"

    def call(self) -> ForcedCall | None:
        """The tool call that the request forces; None: the answer is a text. Raises UnfitChoice."""
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(choice, ToolChoice):
            return forced_call(functions, choice.function.name)
        if choice != "required":
            raise UnfitChoice("tool_choice must be auto, none, required, or a function")
        return forced_call(functions, None)


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize: of a prompt, or of a chat."""

    prompt: str | None = None
    messages: list[Message] | None = None

    def token_ids(self) -> list[int]:
        return tokenize(chat_text(self.messages) if self.prompt is None else self.prompt)


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: TokenIds


def chat_text(messages: Sequence[Message] | None) -> str:
    """A chat as one prompt, which ends where the assistant's answer begins."""
    turns = [f"<|{message.role}|>\n{message.text()}\n" for message in messages or ()]
    return "".join(turns) + "<|assistant|>\n"


def tokenize(text: str) -> list[int]:
    """A token for each UTF-8 byte."""
    return list(text.encode())


def detokenize(token_ids: Sequence[int]) -> str:
    """Printable ASCII as text, other tokens as <number>: readable wherever a stream is cut."""
    return "".join(chr(token) if 32 <= token < 127 else f"<{token}>" for token in token_ids)


def untokenize(token_ids: Sequence[int]) -> str:
    """The text that `tokenize` made into these tokens; as `detokenize` if a token is no byte."""
    if all(token < 256 for token in token_ids):
        return bytes(token_ids).decode(errors="replace")
    return detokenize(token_ids)


class Reply:
    """Writes one answer in the form of completions or chats: whole, or in chunks of a stream."""

    def __init__(
        self, request: CompletionRequest | ChatRequest, model: str, request_id: str | None
    ) -> None:
        self._is_chat = isinstance(request, ChatRequest)
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._id = f"{kind}-{request_id or uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._prompt = request.token_ids() if request.return_token_ids else None
        self._finish_reason = request.limit()[1]
        self._include_usage = request.include_usage
        self._call = request.call()
        self._sent = 0
        """Characters of the tool call's arguments that are written."""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        content: dict[str, Any]
        if self._is_chat:
            message = self._content(completion.token_ids, first=True)
            content = {"message": {"role": "assistant", "content": None, **message}}
        else:
            content = {"text": detokenize(completion.token_ids)}
        kind = "chat.completion" if self._is_chat else "text_completion"
        choice = self._choice(content, completion.token_ids, True, True)
        return self._body(kind, [choice]) | {"usage": usage(completion)}

    def chunk(self, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """The event with the next tokens of a stream. first, last: whether the stream begins, ends
        with them."""
        content: dict[str, Any] = {}
        if self._is_chat:
            role = {"role": "assistant"} if first else {}
            content["delta"] = role | self._content(token_ids, first=first, index=0)
        else:
            content["text"] = detokenize(token_ids)
        return sse(self._body(self._chunk_kind, [self._choice(content, token_ids, first, last)]))

    def end(self, completion: Completion) -> bytes:
        """The events after the last tokens of a stream: the usage, for clients that requested it,
        and [DONE]."""
        done = b"data: [DONE]\n\n"
        if not self._include_usage:
            return done
        return sse(self._body(self._chunk_kind, []) | {"usage": usage(completion)}) + done

    def _content(self, token_ids: Sequence[int], *, first: bool, **place: int) -> dict[str, Any]:
        """The fields of a chat's message for these tokens: text, or the next characters of the
        forced tool call's arguments, one for each token. place: the call's index, in a stream."""
        if self._call is None:
            return {"content": detokenize(token_ids)}
        part = self._call.arguments[self._sent : self._sent + len(token_ids)]
        self._sent += len(token_ids)
        function = {"name": self._call.name, "arguments": part} if first else {"arguments": part}
        named = {"id": f"call_{self._id[-24:]}", "type": "function"} if first else {}
        return {"tool_calls": [{**place, **named, "function": function}]}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(
        self, content: dict[str, Any], token_ids: Sequence[int], first: bool, last: bool
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            **content,
            "logprobs": None,
            "finish_reason": self._finish_reason if last else None,
            "stop_reason": None,
        }
        if self._prompt is not None:
            choice["token_ids"] = list(token_ids)
            choice["prompt_token_ids"] = self._prompt if first else None
        return choice


def usage(completion: Completion) -> dict[str, Any]:
    """The usage of an answer: tokens of prompt and answer, and cached tokens."""
    answered = len(completion.token_ids)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "total_tokens": completion.prompt_tokens + answered,
        "completion_tokens": answered,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def refusal(status: int, kind: str, message: str) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def event(kind: str, **about: Any) -> bytes:
    """One server-sent event with a name."""
    data = msgspec.json.encode({"type": kind, **about})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
