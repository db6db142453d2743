"""Canaries: twenty small bodies, each with a feature or two, that show whether an engine and the
router make the same tokens. Sent at the first prompt for a worker, and again after the router's
configuration was reloaded."""

from typing import Any

import msgspec

from router.request.bodies import CHAT, COMPLETION, TEXT, BodyFormat

_USER = {"role": "user", "content": "What is 2 + 2? Ünïcode: 日本語 🙂, a\ttab."}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_AGAIN = {"role": "user", "content": "  And 3 + 3 ?\n"}
_SYSTEM = {"role": "system", "content": "You are a careful\nassistant."}
_PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one part"}, {"type": "text", "text": "another"}],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A name"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
        }
    ],
}
_CALL_WITH_TEXT = {**_CALL, "content": "Let me look."}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'}
_THOUGHT = {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."}

_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_USER]},
    {"messages": [_SYSTEM, _USER]},
    {"messages": [_USER, _ANSWER, _AGAIN]},
    {"messages": [_SYSTEM, _USER, _ANSWER, _AGAIN]},
    {"messages": [_PARTS]},
    {"messages": [_SYSTEM, _PARTS]},
    {"messages": [_USER], "tools": [_TOOL]},
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
    {"messages": [_USER, _CALL, _RESULT], "tools": [_TOOL]},
    {"messages": [_SYSTEM, _USER, _CALL, _RESULT], "tools": [_TOOL]},
    {"messages": [_SYSTEM, _USER, _CALL_WITH_TEXT, _RESULT, _ANSWER, _AGAIN], "tools": [_TOOL]},
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL], "tool_choice": "auto"},
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL], "tool_choice": "none"},
    {"messages": [_USER, _THOUGHT, _AGAIN]},
    {"messages": [_SYSTEM, _USER, _THOUGHT, _AGAIN]},
    {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [_SYSTEM, _USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [{"role": "developer", "content": "Be brief."}, _USER]},
)


def canaries(model: str) -> list[tuple[BodyFormat, bytes]]:
    """The canaries, each with its format. model: the name by which the engine serves the model."""
    bodies = [(CHAT, msgspec.json.encode({"model": model, **chat})) for chat in _CHATS]
    completion = msgspec.json.encode({"model": model, "prompt": "Once upon\n a time, 123 — ß"})
    return [
        *bodies,
        (COMPLETION, completion),
        (TEXT, "Once upon\n a time, 456 — ß".encode()),
    ]
