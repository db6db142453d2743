"""OpenAI's responses as the chats of engines. vLLM's tokens are in test_dialects.py's captures."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router.request.dialects import sglang_responses, vllm_responses
from router.request.dialects.dialect import ChatTemplate, ModelFacts
from router.request.prompt_error import PromptError
from router.request.refusal import Reason
from router.request.rendering.template import Template
from tests.stage.prompts.responses import (
    ANSWER,
    CALL,
    FUNCTIONS,
    REASONING,
    RESPONSES,
    SEARCH,
    USER,
    response,
)

CONVERTED = Path(__file__).parent / "converted/sglang-responses.json"
"""See tests/real_engines/record_responses.py."""
GOLDEN = json.loads(CONVERTED.read_text())["cases"]
SHOWS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
LOSES = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
CLOCK = "{{ strftime_now('%Y') }}" + SHOWS


def compiled(text: str) -> ChatTemplate:
    return Template(text, lambda: datetime(2026, 1, 1, tzinfo=UTC))


def facts_of(*templates: ChatTemplate) -> ModelFacts:
    named = {f"template {number}": template for number, template in enumerate(templates)}
    return ModelFacts(named, {}, "auto", tools_dropped=False)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("template", "is_inline"), [(LOSES, False), (SHOWS, True)], ids=["loses", "shows"]
)
@pytest.mark.parametrize("name", RESPONSES)
def test_a_chat_is_that_of_sglangs_converter(name: str, template: str, is_inline: bool) -> None:
    chat = sglang_responses.to_chat(RESPONSES[name], facts_of(compiled(template)))
    golden = GOLDEN[name][is_inline]
    thinks = golden.pop("chat_template_kwargs") or {}  # the chat's own reading of an effort adds it
    kwargs = chat.pop("chat_template_kwargs") or {}
    no_thoughts = {"thinking": False, "enable_thinking": False}
    assert thinks == (no_thoughts | kwargs if chat["reasoning_effort"] == "none" else kwargs)
    assert without_none(chat) == without_none(golden)


@pytest.mark.parametrize(
    ("templates", "is_shown"),
    [((SHOWS,), True), ((LOSES,), False), ((CLOCK,), False), ((SHOWS, SHOWS), False)],
)
def test_systems_stay_apart_for_the_templates_that_sglangs_trial_takes(
    templates: tuple[str, ...], is_shown: bool
) -> None:
    facts = facts_of(*map(compiled, templates))
    chat = sglang_responses.to_chat(RESPONSES["developer_later"], facts)
    roles = [message["role"] for message in chat["messages"]]
    assert roles == (["user", "system", "user"] if is_shown else ["system", "user", "user"])


ITEM = {"type": "item_reference", "id": "a"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m"},
        {"input": 3},
        {"input": []},
        response("text"),
        response(USER, previous_response_id="resp_1"),
        response(USER, instructions=3),
        response(USER, reasoning="high"),
        response(USER, tools={}),
        response(USER, tools=["f"]),
        response(USER, tools=[{"type": "unknown"}]),
        response(USER, tools=[{"type": "function"}]),
        response(ITEM),
        response({"role": 1, "content": "a"}),
        response({"type": "function_call", "arguments": "{}", "call_id": "a"}),
        response({**REASONING, "content": None, "encrypted_content": "sglang-reasoning-v1.x"}),
        response({**REASONING, "content": [{"type": "reasoning_text", "text": 1}]}),
    ],
)
def test_a_body_whose_tokens_only_an_engine_knows_has_none(body: dict[str, Any]) -> None:
    facts = facts_of(compiled(SHOWS))
    for to_template in (vllm_responses.to_template, sglang_responses.to_template):
        with pytest.raises(PromptError) as refused:
            to_template(body, facts)
        assert refused.value.reason is Reason.UNSUPPORTED_CONTENT


@pytest.mark.parametrize(
    "body",
    [
        response(IMAGE),
        response(USER, prompt={"id": "p"}),
        response(USER, truncation="auto"),
        response(USER, kv_transfer_params={"prompt_token_ids": [1]}),
        response({**USER, "status": "in_progress"}),
        response({**ANSWER, "content": [{"type": "refusal", "refusal": "No."}]}),
        response({**ANSWER, "content": []}),
        response({**CALL, "call_id": None}),
        response({"type": "function_call_output", "call_id": "a", "output": None}),
        response({"type": "reasoning", "id": "a"}),
        response(USER, tools=[{"type": "namespace", "name": "n"}]),
        RESPONSES["tools_grammar"],
    ],
)
def test_what_vllm_refuses_or_reads_by_itself_has_no_tokens(body: dict[str, Any]) -> None:
    template = compiled(SHOWS)
    with pytest.raises(PromptError) as refused:
        vllm_responses.to_template(body, ModelFacts({"default": template}, {}, "auto", False))
    assert refused.value.reason is Reason.UNSUPPORTED_CONTENT


@pytest.mark.parametrize(
    "body",
    [
        response(USER, reasoning={"reasoning_effort": "none"}),
        response({**ANSWER, "tool_calls": "x"}, ANSWER, USER),
        response({**REASONING, "summary": "x"}),
        response({"type": "function_call_output", "call_id": "a", "output": [{"text": 1}]}),
    ],
)
def test_what_sglang_reads_by_itself_has_no_tokens(body: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as refused:
        sglang_responses.to_template(body, facts_of(compiled(SHOWS)))
    assert refused.value.reason is Reason.UNSUPPORTED_CONTENT


def test_arguments_that_are_no_object_are_an_empty_one_on_sglang() -> None:
    facts = facts_of(compiled(SHOWS))
    given: list[Any] = ["", "{", "[1]", '{"a": NaN}', None, {"a": 1}, '{"a": 1}']
    items = [{**CALL, "arguments": arguments} for arguments in given]
    (message,) = sglang_responses.to_chat(response(*items), facts)["messages"]
    written = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert written == [*["{}"] * 5, '{"a": 1}', '{"a": 1}']


def test_models_of_the_harmony_format_have_the_engines_tokens() -> None:
    facts = facts_of(compiled("<|start|>{{ messages[0].content }}<|channel|>"))
    for to_template in (vllm_responses.to_template, sglang_responses.to_template):
        with pytest.raises(PromptError, match="Harmony"):
            to_template(response(USER), facts)


def test_tools_of_which_the_model_sees_none_are_an_empty_list_on_vllm() -> None:
    template = compiled(SHOWS)
    body = response(USER, tools=[SEARCH])
    given = vllm_responses.to_template(
        body, ModelFacts({"default": template}, {}, "auto", tools_dropped=False)
    )
    assert given.tools == []
    both = ModelFacts({"default": template, "tool_use": template}, {}, "auto", False)
    with pytest.raises(PromptError, match="choose another template"):
        vllm_responses.to_template(body, both)
    assert vllm_responses.to_template(response(USER, tools=FUNCTIONS), both).tools


def test_a_call_has_its_name_before_its_arguments_as_in_no_chat() -> None:
    facts = ModelFacts({"default": compiled(SHOWS)}, {}, "auto", tools_dropped=False)
    given = vllm_responses.to_template(RESPONSES["calls"], facts)
    assert list(given.messages[1]["tool_calls"][0]["function"]) == ["name", "arguments"]
