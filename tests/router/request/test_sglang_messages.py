"""Anthropic's messages as SGLang's chats. The engine has no endpoint that shows its own."""

from typing import Any

import pytest

from router.request.dialects.dialect import ModelFacts
from router.request.dialects.sglang_messages import to_chat
from router.request.prompt_error import PromptError
from router.request.refusal import Reason

FACTS = ModelFacts({}, {}, "auto", tools_dropped=False)
USER = {"role": "user", "content": "Hello"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content} | more


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return to_chat({"messages": list(messages), **fields}, FACTS)


def of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The chat's messages."""
    made = chat(*messages)["messages"]
    assert isinstance(made, list)
    return made


@pytest.mark.parametrize(
    ("system", "made"),
    [
        (None, []),
        ("  ", []),
        (" Help. ", [{"role": "system", "content": " Help. "}]),
        ([text("a"), text(""), text("b")], [{"role": "system", "content": "a\nb"}]),
        (
            [text("x-anthropic-billing-header: cch=2")],
            [{"role": "system", "content": "x-anthropic-billing-header: cch=2"}],
        ),
    ],
)
def test_system_texts_are_lines_of_one_message(system: Any, made: list[dict[str, Any]]) -> None:
    assert chat(USER, system=system)["messages"] == [*made, USER]


def test_a_users_blocks_stay_in_order_around_results_of_tools() -> None:
    blocks = [text("first"), result("18"), text("So"), text("then?")]
    assert of({"role": "user", "content": blocks}) == [
        {"role": "user", "content": "first"},
        {"role": "tool", "tool_call_id": "t1", "content": "18"},
        {"role": "user", "content": [text("So"), text("then?")]},
    ]


@pytest.mark.parametrize(
    ("content", "made"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ([text("")], ""),
        ([text("a")], "a"),
        ([text("a"), text("b")], [text("a"), text("b")]),
    ],
)
def test_a_tools_result_is_a_message(content: Any, made: Any) -> None:
    message = {"role": "tool", "tool_call_id": "t1", "content": made}
    assert of({"role": "user", "content": [result(content)]}) == [message]


def test_an_assistants_calls_stand_beside_its_text() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": [1, "ü"]}}
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"a": [1, "\\u00fc"]}'},
    }
    turns: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "both": ([text("Let me"), use], {"content": "Let me", "tool_calls": [call]}),
        "call": ([use], {"tool_calls": [call]}),
        "empty text": ([text("")], {"content": ""}),
        "nothing": ([], {"content": ""}),
    }
    for name, (blocks, fields) in turns.items():
        assert of({"role": "assistant", "content": blocks}) == [{"role": "assistant", **fields}], (
            name
        )


def test_tools_have_a_description_and_their_own_schema() -> None:
    schema = {"properties": {}}
    tool = {"name": "now", "input_schema": schema}
    made = {"name": "now", "description": "", "parameters": schema, "strict": False}
    tools = [{"type": "function", "defer_loading": None, "function": made}]
    for choice, expected in (
        (None, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ):
        body = chat(USER, tools=[tool], tool_choice=choice)
        assert (body["tools"], body["tool_choice"]) == (tools, expected)
    assert "tools" not in chat(USER, tools=[])


def test_the_effort_is_that_of_a_chat() -> None:
    assert chat(USER, output_config={"effort": "xhigh"})["reasoning_effort"] == "max"
    assert chat(USER, output_config={"effort": "low"})["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ([USER, {"role": "system", "content": "later"}], {}),
        ([USER], {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], {}),
        ([{"role": "user", "content": [result([{"type": "image"}])]}], {}),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}], {}),
    ],
)
def test_the_rest_is_left_to_the_engine(
    messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    with pytest.raises(PromptError) as caught:
        chat(*messages, **fields)
    assert caught.value.reason is Reason.UNSUPPORTED_CONTENT


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {"tools": "all"}),
        ([USER], {"tools": [{"name": "t", "input_schema": {}}], "tool_choice": "auto"}),
        ([{"role": "tool", "content": "x"}], {}),
        ([{"role": "user", "content": 5}], {}),
        ([{"role": "user", "content": ["text"]}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], {}),
        ([{"role": "assistant", "content": [{"type": "tool_use", "input": []}]}], {}),
    ],
)
def test_what_no_engine_takes_is_refused(
    messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    with pytest.raises(PromptError):
        chat(*messages, **fields)
