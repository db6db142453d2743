"""Turns a body of OpenAI's responses into the chat that vLLM makes of it. Pure.

Written from what vLLM 0.32 does (vllm/entrypoints/openai/responses/utils.py and protocol.py,
renderers/online_renderer.py, read 2026-11-28), and compared with its /v1/responses/render.
"""

from typing import Any

from router.request.dialects import vllm
from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.messages import Fields, check_absent, refused, text_or_none
from router.request.dialects.responses import (
    CUSTOM_INPUT,
    check_template,
    custom_arguments,
    instructions_of,
    items_of,
    reasoning_of,
    required_text,
    tools_of,
)
from router.request.prompt_error import type_name, unsupported

_ROLES = ("user", "system", "developer")
_ANSWERED = ("output_text", "input_text")
_OPEN = ("in_progress", "incomplete")
"""Statuses of a last item that the model continues."""
_REFUSED = (
    *("previous_input_messages", "prompt", "mm_processor_kwargs", "media_io_kwargs"),
    "kv_transfer_params",
)
_FUNCTION = ("name", "description", "parameters", "strict", "defer_loading")


def to_template(fields: Fields, facts: ModelFacts) -> TemplateInput:
    """The template's input for a response's body. Raises PromptError."""
    check_template(facts)
    given = vllm.to_template(to_chat(fields), facts, call_fields=("name", "arguments"))
    is_dropped = fields.get("tool_choice") == "none" and facts.tools_dropped
    if fields.get("tools") and given.tools is None and not is_dropped:
        if "tool_use" in facts.templates:
            raise unsupported("tools that the model never sees make vLLM choose another template")
        given.tools = []
    return given


def to_chat(fields: Fields) -> Fields:
    """The body of the chat that vLLM makes of a response's body; the tokenizer adds its special
    tokens around the chat's text. Raises PromptError."""
    check_absent(fields, _REFUSED)
    if fields.get("truncation", "disabled") != "disabled":
        raise unsupported("truncation changes the prompt in a way that only an engine knows")
    messages, items = instructions_of(fields), items_of(fields)
    for item in items:
        _add(messages, item)
    if not messages:
        raise unsupported("an input without items has a prompt that only an engine knows")
    goes_on = bool(items) and _goes_on(items[-1])
    chat: Fields = {
        "messages": messages,
        "add_special_tokens": True,
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        "reasoning_effort": (reasoning_of(fields) or {}).get("effort"),
        "chat_template_kwargs": fields.get("chat_template_kwargs"),
    }
    shown = [function for tool in tools_of(fields) for function in _functions(tool)]
    if shown:  # else the template gets an empty list, which no chat may have
        choice = "none" if fields.get("tool_choice") == "none" else None
        chat |= {"tools": shown, "tool_choice": choice}
    return chat


def _goes_on(last: Fields) -> bool:
    """Whether the model continues the last item, instead of answering it. Raises PromptError."""
    if last.get("status") not in _OPEN or last.get("type") not in (None, "message", "reasoning"):
        return False
    if last.get("type") != "reasoning" and last.get("role") != "assistant":
        raise unsupported("a last item that is incomplete and not the assistant's")
    return True


def _add(messages: list[Fields], item: Fields) -> None:
    """Adds an input item to the messages: as a message, or to a last message of the assistant."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type"):
        case "function_call":
            space = text_or_none(item, "namespace")
            name = required_text(item, "name")
            name = f"{space}__{name}" if space else name
            _add_call(messages, last, item, name, required_text(item, "arguments"))
        case "custom_tool_call":
            _add_call(messages, last, item, required_text(item, "name"), custom_arguments(item))
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item.get("output"))
            answered = required_text(item, "call_id")
            messages.append({"role": "tool", "content": content, "tool_call_id": answered})
        case "reasoning":
            _add_part(messages, last, "reasoning", _thought(item))
        case None | "message":
            role = required_text(item, "role")
            if role == "assistant":
                _add_part(messages, last, "content", _answer(item.get("content")))
            elif role in _ROLES:
                content = _content(item.get("content"))
                messages.append({**item, "role": role, "content": content})
            else:
                raise refused("an item whose role is not user, system, developer or assistant")
        case kind:
            raise unsupported(
                f"an item of the type {kind!r:.40} has tokens that only an engine knows"
            )


def _add_call(
    messages: list[Fields], last: Fields | None, item: Fields, name: str, arguments: str
) -> None:
    function = {"name": name, "arguments": arguments}
    call = {"id": required_text(item, "call_id"), "function": function, "type": "function"}
    if last is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        last.setdefault("tool_calls", []).append(call)


def _add_part(messages: list[Fields], last: Fields | None, name: str, text: str) -> None:
    """Adds a text (content) or reasoning to the assistant's last message, or as a new message if
    that one has it already. name: the message's field."""
    if last is None or last.get(name) is not None:
        messages.append({"role": "assistant", name: text})
    else:
        last[name] = text


def _thought(item: Fields) -> str:
    if item.get("encrypted_content"):
        raise refused("a reasoning item with encrypted_content")
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            return required_text(parts[0], "text")
    if not isinstance(item.get("summary"), list):
        raise refused("a reasoning item without an array of summaries")
    return ""


def _answer(content: Any) -> str:
    """The text of an earlier answer of the model: of its first part, as vLLM has it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused("an item of the assistant without content")
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if kinds[0] not in _ANSWERED or any(kind != kinds[0] for kind in kinds):
        raise unsupported(
            "an answer with other parts than text has tokens that only an engine knows"
        )
    texts = [required_text(part, "text") for part in content]
    return texts[0]


def _content(content: Any) -> Any:
    """An item's content for a chat: a string, or an array of text parts. Raises PromptError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"an item's content that is {type_name(content)}, not a string or an array")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "input_text":
            raise unsupported("a part that is no input_text has tokens that only an engine knows")
        parts.append({**part, "type": "text", "text": required_text(part, "text")})
    return parts


def _functions(tool: Fields) -> list[Fields]:
    """The functions of a chat as which vLLM shows a tool to the model."""
    match tool["type"]:
        case "function":
            return [_function(tool, "")]
        case "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
                raise refused("a namespace whose tools are no array of objects")
            space = f"{required_text(tool, 'name')}__"
            return [_function(each, space) for each in inner if each.get("type") == "function"]
        case "custom":
            form = tool.get("format")
            if isinstance(form, dict) and form.get("type") == "grammar":
                raise refused("a custom tool with a grammar")
            shown = {name: tool.get(name) for name in ("name", "description")}
            return [_function({**shown, "parameters": CUSTOM_INPUT}, "")]
        case kind:
            raise refused(f"a tool of the type {kind!r:.40}")


def _function(tool: Fields, space: str) -> Fields:
    function = {name: tool.get(name) for name in _FUNCTION}
    function["name"] = space + required_text(tool, "name")
    return {"type": "function", "function": function}
