"""Checks of request bodies that the dialects share. Pure."""

from collections.abc import Iterable
from typing import Any

from router.request.prompt_error import PromptError, malformed, type_name, unsupported

Fields = dict[str, Any]
"""A JSON object's fields by name."""

RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Keyword arguments that transformers' apply_chat_template itself takes."""


def checked_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The body's messages: at least one, each an object with a role. Raises PromptError."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise malformed(f"messages is {type_name(messages)}, not an array")
    if not messages:
        raise malformed("messages is an empty array")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise malformed(f"messages[{place}] is {type_name(message)}, not an object")
        if not isinstance(message.get("role"), str):
            raise malformed(f"messages[{place}] has no role, which must be a string")
    return messages


def check_absent(fields: Fields, names: Iterable[str]) -> None:
    """Raises PromptError for a body with one of these fields, which change the prompt in the
    engine."""
    for name in names:
        if fields.get(name) is not None:
            raise unsupported(f"{name} changes the prompt in a way that only an engine knows")


def named_function(tool: Any) -> Fields:
    """The function of a chat's tool. Raises PromptError."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused("a tool without a named function")
    return function


def drop_unset_flags(function: Fields) -> None:
    """Removes the flags `strict` and `defer_loading` from a tool's function where they are null.
    Raises PromptError for another value that is no boolean."""
    for name in ("strict", "defer_loading"):
        if function[name] is None:
            del function[name]
        elif not isinstance(function[name], bool):
            raise refused(f"a tool whose {name} is no boolean")


def refused(what: str) -> PromptError:
    """The error for a body that the dialect's engine release refuses; the engine itself answers it.
    what: the part of the body at fault, a phrase with a noun."""
    return unsupported(f"the engine refuses {what}")


def flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    """Boolean value of a field, or the default if it is null or absent. Raises PromptError."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(f"{name} that is {type_name(value)}, not a boolean")
    return value


def text_or_none(fields: dict[str, Any], name: str) -> str | None:
    """Text of a field; None: null or absent. Raises PromptError for any other value."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(f"{name} that is {type_name(value)}, not a string")
    return value


def kwargs_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A copy of the request's chat_template_kwargs. Raises PromptError."""
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise refused(f"chat_template_kwargs that is {type_name(kwargs)}, not an object")
    if clash := sorted(RESERVED & kwargs.keys()):
        raise unsupported(f"chat_template_kwargs names {clash[0]}, which only an engine may set")
    return dict(kwargs)


def in_order(fields: dict[str, Any], first: Iterable[str]) -> dict[str, Any]:
    """A copy of the fields that begins with those named in `first`, in that order."""
    result = {name: fields[name] for name in first if name in fields}
    return {**result, **{name: value for name, value in fields.items() if name not in result}}
