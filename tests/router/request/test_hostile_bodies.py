"""Whatever the bytes: tokens, or a PromptError with a sentence."""

import asyncio
import json
import random
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.request import bodies
from router.request.dialects.table import DIALECTS
from router.request.prompt_error import PromptError
from router.request.prompt_processes.children import Children
from router.request.prompt_settings import PROMPTS_MAX, RendererSettings
from router.request.refusal import Reason
from router.request.rendering import encoder
from router.request.rendering.renderer import Renderer
from tests.stage.prompts.bodies import CHATS, COMPLETIONS, MESSAGES, chat
from tests.stage.prompts.captures import TEMPLATES
from tests.stage.prompts.responses import RESPONSES
from tests.stage.prompts.tiny_tokenizer import make_folder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "role", "content", "function", "name", "output", "summary"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
BODIES = [
    (kind, body)
    for kind, made in (
        (bodies.CHAT, CHATS),
        (bodies.COMPLETION, COMPLETIONS),
        (bodies.MESSAGES, MESSAGES),
        (bodies.RESPONSES, RESPONSES),
    )
    for body in made.values()
]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> list[Renderer]:
    room = tmp_path_factory.mktemp("folders")
    return [
        Renderer(RendererSettings(folder=str(make_folder(room / name, text))))
        for name, text in TEMPLATES.items()
    ]


def outcome(
    renderer: Renderer, kind: bodies.BodyFormat, data: bytes, engine: str
) -> PromptError | None:
    try:
        result = renderer.render(kind, data, engine)
    except PromptError as error:
        return error
    assert result.count * 4 == len(result.token_bytes)
    return None


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_a_wrong_value_at_any_field_is_an_outcome(
    data: st.DataObject, renderers: list[Renderer]
) -> None:
    kind, body = data.draw(st.sampled_from(BODIES))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(body)))
        body = replaced(body, place, data.draw(JSON))
    engine = data.draw(st.sampled_from(list(DIALECTS)))
    outcome(data.draw(st.sampled_from(renderers)), kind, json.dumps(body).encode(), engine)


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.binary(max_size=60), kind=st.sampled_from(list(bodies.WITH_TOKENS.values())))
def test_any_bytes_are_an_outcome(
    data: bytes, kind: bodies.BodyFormat, renderers: list[Renderer]
) -> None:
    outcome(renderers[0], kind, data, "vllm")


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not JSON"),
        (b"null", "null, not an object"),
        (b'{"messages": NaN}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"messages": ' * 50_000, "nested too deep"),
        (b'{"messages": []}', "empty array"),
        (b'{"messages": {}}', "an object, not an array"),
        (b'{"messages": [1]}', "is a number, not an object"),
        (b'{"messages": [{}]}', "has no role"),
    ],
)
def test_a_body_that_no_engine_reads_is_malformed(
    data: bytes, sentence: str, engine: str, renderers: list[Renderer]
) -> None:
    error = outcome(renderers[0], bodies.CHAT, data, engine)
    assert error is not None
    assert error.reason is Reason.MALFORMED_BODY
    assert sentence in error.message


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("key", ["properties", "items", "x"])
def test_deep_values_in_a_tool_are_an_outcome(
    key: str, engine: str, renderers: list[Renderer]
) -> None:
    deep = f'{{"{key}":' * 400 + "{}" + "}" * 400
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
    for renderer in renderers:
        outcome(renderer, bodies.CHAT, body.encode(), engine)


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("package", ["fastokens", "tokenizers"])
def test_a_lone_surrogate_in_a_calls_arguments_is_an_outcome(
    package: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_LOADERS", {package: encoder._LOADERS[package]})
    folder = make_folder(tmp_path, "{{ messages[0].tool_calls | tojson }}")
    renderer = Renderer(RendererSettings(folder=str(folder)))
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    call = {"id": "a", "type": "function", "function": function}
    body = chat({"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"})
    error = outcome(renderer, bodies.CHAT, json.dumps(body).encode(), engine)
    assert error is not None
    assert (error.reason, error.shape) == (Reason.UNSUPPORTED_CONTENT, "chat+no_content+tool_calls")


@pytest.mark.parametrize("engine", DIALECTS)
def test_ten_thousand_messages_have_tokens(engine: str, renderers: list[Renderer]) -> None:
    turns = [{"role": role, "content": "yes"} for role in ("user", "assistant")] * 5_000
    body = chat(*turns, {"role": "user", "content": "so?"})
    assert outcome(renderers[0], bodies.CHAT, json.dumps(body).encode(), engine) is None


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("item", [RESPONSES["calls"]["input"][1], RESPONSES["history"]["input"][1]])
def test_a_hundred_thousand_items_have_tokens(
    engine: str, item: Any, renderers: list[Renderer]
) -> None:
    """The work for items grows with their number, not with its square."""
    body = {"model": "m", "input": [item] * 100_000}
    assert outcome(renderers[0], bodies.RESPONSES, json.dumps(body).encode(), engine) is None


ODD = (None, 1, "x", [], {}, [{"type": []}], [[]])


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("name", RESPONSES)
def test_any_field_of_a_response_may_be_odd(
    engine: str, name: str, renderers: list[Renderer]
) -> None:
    body = RESPONSES[name]
    objects = [place for place in places(body) if isinstance(reduce(getitem, place, body), dict)]
    added = [(*place, key) for place in objects for key in ("status", "tool_calls", "type", "text")]
    for place in [*places(body)[1:], *added]:
        for odd in ODD:
            data = json.dumps(with_field(body, place, odd)).encode()
            error = outcome(renderers[0], bodies.RESPONSES, data, engine)
            assert error is None or error.reason is not Reason.MALFORMED_BODY


def with_field(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with a field set, which may be one that it lacks."""
    copy = value.copy()
    copy[path[0]] = new if len(path) == 1 else with_field(value[path[0]], path[1:], new)
    return copy


def test_of_a_key_that_comes_twice_the_last_counts(renderers: list[Renderer]) -> None:
    twice = b'{"prompt": "one", "prompt": "two"}'
    once = b'{"prompt": "two"}'
    tokens = [
        renderers[0].render(bodies.COMPLETION, data, "vllm").token_bytes for data in (twice, once)
    ]
    assert tokens[0] == tokens[1]


def test_prompts_are_bounded(renderers: list[Renderer]) -> None:
    for count, refused in ((PROMPTS_MAX, False), (PROMPTS_MAX + 1, True)):
        body = json.dumps({"prompt": ["x"] * count}).encode()
        error = outcome(renderers[0], bodies.COMPLETION, body, "vllm")
        assert (error is not None and error.reason is Reason.PROMPT_TOO_LONG) is refused


def in_child(template: str, body: dict[str, Any], folder: Path, **bounds: Any) -> PromptError:
    """The error of a template that fails, in a process like those of routers: its address space is
    bounded, whatever the kernel's vm.overcommit_memory."""

    async def run() -> PromptError:
        pool = Children(1, **bounds)
        renderer = RendererSettings(folder=str(make_folder(folder, template)))
        good = RendererSettings(folder=str(make_folder(folder / "good", "{{ messages }}")))
        content = json.dumps(body).encode()
        errors = []
        try:
            for engine in DIALECTS:
                with pytest.raises(PromptError) as caught:
                    await pool.render("bad", renderer, bodies.CHAT, content, engine, 0)
                errors.append(caught.value)
                done, _ = await pool.render("good", good, bodies.CHAT, content, engine, 0)
                assert done.count
        finally:
            await pool.close()
        assert len({error.reason for error in errors}) == 1
        return errors[0]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system message, please') }}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 'a' * 10 ** 12 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ undefined | tojson }}",
    ],
)
def test_a_template_that_fails_is_an_outcome(template: str, tmp_path: Path) -> None:
    error = in_child(template, CHATS["user"], tmp_path)
    assert error.reason is Reason.TEMPLATE_REFUSED
    assert error.shape == "chat"


GREEDY = (
    "{{{{ 'a' * {n} }}}}",
    "{{{{ ['a'] * {n} }}}}",
    "{{{{ ('a' * 1000) | center({n}) }}}}",
    "{{{{ '%{n}d' % 1 }}}}",
    "{{{{ 'a'.ljust({n}) }}}}",
    "{{{{ 'aa'.replace('a', 'b' * {n}) }}}}",
    "{{% set x = 'a' * {n} %}}{{{{ [x + x, x * 2] | length }}}}",
    "{{% set x = 'a' * 100000000 %}}{{{{ (x, x + 'b', x + 'c', x + 'd', x + 'e') | length }}}}",
    "{{{{ ([messages] * {n}) | length }}}}",
    "{{{{ 'a' | indent({n}) }}}}x{{{{ ('\\n' * 9) | indent({n}) }}}}",
)


@pytest.mark.parametrize("seed", range(10))
def test_a_template_that_takes_memory_is_an_outcome_within_its_bound(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    template = GREEDY[seed].format(n=rng.choice((10**9, 10**10, 10**12, 2**40)))
    body = CHATS["user"]
    error = in_child(template, body, tmp_path, memory_bytes=320 << 20)
    assert error.reason in (Reason.TEMPLATE_REFUSED, Reason.RENDERER_UNAVAILABLE)


def test_a_template_that_is_none_is_refused_on_load(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "{% for %}")
    with pytest.raises(PromptError, match="chat template failed") as raised:
        Renderer(RendererSettings(folder=str(folder)))
    assert raised.value.reason is Reason.TEMPLATE_REFUSED
