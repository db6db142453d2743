"""A shape names what changes an engine's treatment of a body, and nothing of its texts."""

from typing import Any

import pytest

from router.request import bodies
from router.request.rendering.body import Body
from router.request.rendering.shape import shape_of
from tests.stage.prompts.bodies import CHATS, COMPLETIONS, MESSAGES, TOOLS, USER, chat
from tests.stage.prompts.responses import RESPONSES, response


@pytest.mark.parametrize(
    ("kind", "fields", "shape"),
    [
        (bodies.CHAT, CHATS["user"], "chat"),
        (bodies.CHAT, CHATS["tools_and_system"], "chat+system+tools"),
        (bodies.CHAT, CHATS["tool_fields"], "chat+tool_fields+tools"),
        (bodies.CHAT, CHATS["tool_calls"], "chat+no_content+tool+tool_calls+tools"),
        (bodies.CHAT, CHATS["kwargs"], "chat+kwargs(enable_thinking,style)"),
        (bodies.CHAT, CHATS["effort_none"], "chat+effort_none"),
        (bodies.CHAT, CHATS["continued"], "chat+assistant_last+continue+no_generation_prompt"),
        (bodies.COMPLETION, COMPLETIONS["texts"], "completion+list"),
        (bodies.COMPLETION, COMPLETIONS["ids"], "completion+ids"),
        (
            bodies.MESSAGES,
            MESSAGES["blocks"],
            "messages+parts+reasoning+system+tool+tool_calls+tools",
        ),
        (bodies.RESPONSES, RESPONSES["text"], "responses"),
        (bodies.RESPONSES, RESPONSES["history"], "responses+parts"),
        (bodies.RESPONSES, RESPONSES["instructions"], "responses+system"),
        (bodies.RESPONSES, RESPONSES["system"], "responses+system_later+systems"),
        (bodies.RESPONSES, RESPONSES["effort_unset"], "responses+effort_unset"),
        (
            bodies.RESPONSES,
            response({"role": "assistant", "content": "a"}, {"type": "function_call"}),
            "responses+tool_calls",
        ),
        (
            bodies.RESPONSES,
            RESPONSES["reasoning_and_call"],
            "responses+reasoning+tool+tool_calls+tools",
        ),
        (bodies.RESPONSES, RESPONSES["tools_custom"], "responses+tool_fields+tools"),
        (bodies.RESPONSES, RESPONSES["tools_space"], "responses+tool_fields+tools"),
        (
            bodies.RESPONSES,
            RESPONSES["call_custom"],
            "responses+custom_calls+tool+tool_fields+tools",
        ),
        (bodies.RESPONSES, RESPONSES["effort_none"], "responses+effort_none"),
        (bodies.RESPONSES, RESPONSES["continued"], "responses+assistant_last+continue+parts"),
        (
            bodies.RESPONSES,
            response({"type": "item_reference", "id": "a"}, previous_response_id="resp_a"),
            "responses+other_item+previous_response_id",
        ),
    ],
)
def test_a_body_has_the_names_of_its_features(
    kind: bodies.BodyFormat, fields: dict[str, Any], shape: str
) -> None:
    assert shape_of(Body(kind, fields)) == shape


def test_names_that_a_client_makes_up_are_bounded() -> None:
    many = {f"name_{number}": 1 for number in range(100)}
    for kwargs in (many, {"n" * 1_000: 1}, {"a b": 1}, {"é": 1}):
        body = chat({"role": "x" * 1_000, "content": "text"}, chat_template_kwargs=kwargs)
        assert shape_of(Body(bodies.CHAT, body)) == "chat+kwargs(many)+other_role"


def test_texts_leave_the_shape_alone() -> None:
    longer = chat({"role": "user", "content": "other " * 100}, tools=TOOLS[:1])
    assert shape_of(Body(bodies.CHAT, longer)) == shape_of(
        Body(bodies.CHAT, chat(USER, tools=TOOLS[:1]))
    )
