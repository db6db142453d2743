"""Turns a chat's body into the chat template's input as vLLM does. Pure.

Written from what vLLM 0.32 does (vllm/renderers/chat_utils.py and hf.py,
entrypoints/openai/chat_completion/protocol.py, read 2026-11-22), and compared with its
/v1/chat/completions/render.

Law: the input equals vLLM's, or PromptError is raised; a body that this release refuses raises
UNSUPPORTED_CONTENT, since another release may take it.
"""

import json
from collections.abc import Iterable
from typing import Any

from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.messages import (
    check_absent,
    checked_messages,
    drop_unset_flags,
    flag,
    in_order,
    kwargs_of,
    named_function,
    refused,
    text_or_none,
)
from router.request.prompt_error import unsupported

Message = dict[str, Any]

BILLING_HEADER = "x-anthropic-billing-header"
"""Beginning of a line in Claude Code's system text, or of a block of its messages, that differs in
every request; vLLM drops it."""
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Kinds of parts that are text, and the key of each kind's text."""
_SKIPPED_WITHOUT_TEXT = ("text", "refusal")
_PART_KEYS = frozenset(
    {
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil"),
        *("image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text"),
        *("thinking", "type", "uuid", "video_embeds", "video_url"),
    }
)
"""Keys that vLLM itself reads in parts of some type; a text part's other keys go to the template.
"""
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_REFUSED = (
    *("chat_template", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"),
    *("truncate_prompt_tokens", "kv_transfer_params"),
)
_UNSET = (None, "auto")
"""Values of a keyword argument that leave the engine's default in force."""


def to_template(
    fields: dict[str, Any],
    facts: ModelFacts,
    *,
    call_fields: tuple[str, ...] = ("arguments", "name"),
) -> TemplateInput:
    """The template's input for a chat's body. call_fields: fields with which the function of a tool
    call begins, in the order in which a template may print them. Raises PromptError."""
    check_absent(fields, _REFUSED)
    tools = _tools(fields, facts)
    template = facts.template_for(tools)
    as_parts = facts.content_format == "openai" or (
        facts.content_format == "auto" and template.loops_over_content
    )
    messages = [_message(message, as_parts, call_fields) for message in checked_messages(fields)]
    if any(message["role"] == "developer" for message in messages) and not (
        '"developer"' in template.text or "'developer'" in template.text
    ):
        messages = _one_system(_developers_as_systems(messages))
    names = _names(fields, facts)
    documents = names.pop("documents", None)
    generation = flag(fields, "add_generation_prompt", True)
    continued = flag(fields, "continue_final_message", False)
    if continued and generation:
        raise refused("continue_final_message without add_generation_prompt: false")
    return TemplateInput(
        messages,
        template,
        tools,
        {name: value for name, value in names.items() if name in template.names},
        documents=documents,
        add_generation_prompt=generation,
        continues=continued,
        specials=flag(fields, "add_special_tokens", False),
    )


def _tools(fields: dict[str, Any], facts: ModelFacts) -> list[dict[str, Any]] | None:
    tools = fields.get("tools")
    choice = fields.get("tool_choice")
    if tools is None:
        if choice not in (None, "none"):
            raise refused("tool_choice without tools")
        return None
    if not isinstance(tools, list) or not tools:
        raise refused("a body whose tools are no array, or an empty one")
    if choice == "none" and facts.tools_dropped:
        return None
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = named_function(tool)
    if tool.get("type", "function") != "function":
        raise refused("a tool of another type than function")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise refused("a tool whose parameters are no object")
    deferred = function.get("defer_loading")
    inner = {
        "name": function["name"],
        "description": text_or_none(function, "description"),
        "parameters": parameters,
        "strict": function.get("strict"),
        "defer_loading": tool.get("defer_loading") if deferred is None else deferred,
    }
    drop_unset_flags(inner)
    result = {"type": "function", "function": inner}
    if tool.get("defer_loading") is not None:
        result["defer_loading"] = tool["defer_loading"]
    return result


def _names(fields: dict[str, Any], facts: ModelFacts) -> dict[str, Any]:
    kwargs = kwargs_of(fields)
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise refused("a reasoning_effort that is no known word, such as low")
        if "enable_thinking" not in kwargs:
            kwargs["enable_thinking"] = effort != "none"
        kwargs["reasoning_effort"] = effort
    documents = fields.get("documents")
    if documents is not None:
        kwargs["documents"] = documents
    kwargs = {name: value for name, value in kwargs.items() if value not in _UNSET}
    documents = kwargs.get("documents", [])
    if not isinstance(documents, list) or not all(
        isinstance(document, dict) and all(isinstance(text, str) for text in document.values())
        for document in documents
    ):
        raise refused("documents that are no array of objects of strings")
    return {**facts.chat_template_kwargs, **kwargs}


def _message(message: Message, as_parts: bool, call_fields: tuple[str, ...]) -> Message:
    role = message["role"]
    result: Message = {"role": role, "content": _content(message, as_parts)}
    if role == "assistant":
        if message.get("tool_calls"):
            if not isinstance(calls := message["tool_calls"], list):
                raise refused("a message whose tool_calls are no array")
            result["tool_calls"] = [_call(call, call_fields) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        result["content"] = _tool_content(result["content"])
    if (name := text_or_none(message, "name")) is not None:
        result["name"] = name
    if isinstance(message.get("task"), str):
        result["task"] = message["task"]
    if role == "developer":
        result["tools"] = _developer_tools(message.get("tools"))
    return result


def _content(message: Message, as_parts: bool) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        if message["role"] != "system":  # the usual case, without a list between
            return [{"type": "text", "text": content}] if as_parts else content
        content = [{"type": "text", "text": content}]
    elif content is None:
        content = []
    elif not isinstance(content, list):
        raise refused("a message's content that is neither a string nor an array of parts")
    if message["role"] == "system":
        content = list(_without_billing_header(content))
    parts = [part for part in (_part(part, as_parts) for part in content) if part]
    return parts if as_parts else "\n".join(parts)  # empty texts get no line, as in vLLM


def _without_billing_header(parts: Iterable[Any]) -> Iterable[Any]:
    for part in parts:
        text = part
        if isinstance(part, dict):
            text = part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield rest if isinstance(part, str) else {**part, "text": rest}


def _part(part: Any, as_parts: bool) -> Any:
    """A content part as the template gets it; None: vLLM skips the part."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if as_parts else part
    if not isinstance(part, dict):
        raise refused("a content part that is neither an object nor a string")
    kind = part.get("type")
    if kind == "tool_reference" and isinstance(name := part.get("name"), str):
        return {"type": "tool_reference", "name": name} if as_parts else name
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None or part.get("uuid") is not None:
        raise unsupported(f"a part of the type {kind!r:.40} has tokens that only an engine knows")
    text = part.get(key)
    if text is None and kind in _SKIPPED_WITHOUT_TEXT:
        return None
    if not isinstance(text, str):
        raise refused("a text part without a string in its text field")
    if not as_parts:
        return text
    extras = {name: value for name, value in part.items() if name not in _PART_KEYS}
    return {"type": "text", "text": text, **extras}


def _tool_content(content: Any) -> Any:
    """A tool message's content: text parts joined to one text, as most templates want it; unchanged
    if a part is no text."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _call(call: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.get("type") != "function"
        or not isinstance(call.get("id"), str)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise refused("a tool call without id, type or a function with name and arguments")
    inner = in_order(function, fields)
    inner["arguments"] = _arguments(function["arguments"])
    result = in_order(call, ("id", "function", "type"))
    result["function"] = inner
    return result


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as a mapping; empty if the text is no JSON object."""
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _developer_tools(tools: Any) -> Any:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise refused("a message's tools that are no array")
    result = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise refused("a message's tool without a function")
        inner = in_order(function, ("name", "description", "parameters", "strict"))
        result.append(in_order({**tool, "function": inner}, ("function", "type")))
    return result


def _developers_as_systems(messages: list[Message]) -> list[Message]:
    return [
        {**{key: message[key] for key in message if key != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]


def _one_system(messages: list[Message]) -> list[Message]:
    """The messages, with all system messages joined to one at the beginning; unchanged if the only
    one is there."""
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts = []
    for place in places:
        content = messages[place]["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        texts.append(content)
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]
