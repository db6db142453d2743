"""Templates with the features that public models' templates use, in small forms of ours."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router.request import bodies
from router.request.dialects.table import DIALECTS
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.rendering.folder import read_folder
from router.request.rendering.renderer import Renderer
from router.request.rendering.template import Template
from tests.stage.prompts.bodies import TOOLS, USER, chat
from tests.stage.prompts.tiny_tokenizer import make_folder, make_tokenizer

USERS = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]


def text_of(template: str, **names: Any) -> str:
    now = datetime(2026, 11, 22, 13, 5, tzinfo=UTC)
    return Template(template, lambda: now).render({"messages": USERS, **names})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        # Llama's: a date in the system prompt
        ("{{ strftime_now('%d %b %Y') }}", "22 Nov 2026"),
        # Qwen's: JSON of a tool as it came, without escapes of HTML or of other scripts
        (
            "{{ {'b': '<ü>', 'a': [1.5, none, true]} | tojson }}",
            '{"b": "<ü>", "a": [1.5, null, true]}',
        ),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
        # GLM's and Qwen's: state that outlives a loop
        (
            "{% set ns = namespace(last=0) %}{% for m in messages %}{% set ns.last = loop.index %}"
            "{% endfor %}{{ ns.last }}",
            "2",
        ),
        # loop controls
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
            "{% endfor %}",
            "two",
        ),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "one"),
        # marks for training
        (
            "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %};"
            "{% endfor %}",
            "one;two;",
        ),
        # blocks on lines of their own leave no trace
        ("{% if true %}\n  {% set x = 1 %}\na\n{% endif %}\nb", "a\nb"),
        # Mistral's: slices and filters
        ("{{ messages[1:][0].content | trim | upper }}{{ messages[::-1][0].content }}", "TWOtwo"),
        # DeepSeek's: text methods and dictionaries
        ("{{ 'a</think>b'.split('</think>')[-1] }}{{ {'x': 1}.get('y', 'z') }}", "bz"),
        # macros
        (
            "{% macro say(m) %}<{{ m.content }}>{% endmacro %}"
            "{% for m in messages %}{{ say(m) }}{% endfor %}",
            "<one><two>",
        ),
        # a name that is not given
        ("{{ enable_thinking is defined }}{% if thinking %}x{% endif %}", "False"),
    ],
)
def test_a_feature_of_public_templates(template: str, text: str) -> None:
    assert text_of(template) == text


def test_a_templates_own_sentence_is_the_errors() -> None:
    with pytest.raises(PromptError, match="roles must alternate"):
        text_of("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "vllm", "sglang"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False, False),
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", True, True),
        (
            "{% for m in messages[1:] %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
            True,
            True,
        ),
        (
            "{% for x in messages %}{% for p in x.content | list %}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        (
            "{% set rest = messages[1:] %}"
            "{% for x in rest %}{% for p in x.content %}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}"
            "{% for p in content %}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        (
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
            False,
        ),
        (
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
            True,
            False,
        ),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}", False, False),
        ("{% for m in messages %}{% for k, v in m.content %}{% endfor %}{% endfor %}", False, True),
    ],
)
def test_a_template_that_wants_parts_is_known_as_engines_know_it(
    template: str, vllm: bool, sglang: bool
) -> None:
    known = Template(template, datetime.now)
    assert (known.loops_over_content, known.loops_over_named_content) == (vllm, sglang)


def rendered(folder: Path, body: Any, engine: str, **more: Any) -> str:
    renderer = Renderer(RendererSettings(folder=str(folder), **more))
    result = renderer.render(bodies.CHAT, json.dumps(body).encode(), engine)
    ids = memoryview(result.token_bytes).cast("I").tolist()
    return str(make_tokenizer().decode(ids, skip_special_tokens=False))


def test_named_templates_are_chosen_as_engines_choose(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path, {"default": "no tools", "tool_use": "{{ tools | length }} tools"}
    )
    with_tools = chat(USER, tools=TOOLS[:2])
    assert rendered(folder, chat(USER), "vllm") == "no tools"
    assert rendered(folder, with_tools, "vllm") == "2 tools"
    assert rendered(folder, with_tools, "sglang") == "no tools"  # always its first


def test_files_win_over_the_configuration(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "from the file", chat_template="from the configuration")
    assert read_folder(folder).templates == {"default": "from the file"}
    (folder / "chat_template.jinja").unlink()
    assert read_folder(folder).templates == {"default": "from the configuration"}
    assert rendered(folder, chat(USER), "vllm", chat_template="{{ 'set' }}") == "set"


def test_a_template_that_wants_bare_functions_gets_them_on_sglang(tmp_path: Path) -> None:
    template = "{% for tool in tools %}{{ tool['name'] + ';' }}{% endfor %}"
    folder = make_folder(tmp_path, template)
    assert rendered(folder, chat(USER, tools=TOOLS[:2]), "sglang") == "get_weather;now;"
    with pytest.raises(PromptError):
        rendered(folder, chat(USER, tools=TOOLS[:2]), "vllm")


def test_defaults_of_the_engine_yield_to_the_request(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "{{ style }} {{ mood }}")
    defaults = {"style": "long", "mood": "calm"}
    body = chat(USER, chat_template_kwargs={"style": "short"})
    for engine in DIALECTS:
        assert rendered(folder, body, engine, chat_template_kwargs=defaults) == "short calm"


@pytest.mark.parametrize(("dropped", "text"), [(False, "2"), (True, "none")])
def test_vllm_drops_tools_under_tool_choice_none_if_started_so(
    tmp_path: Path, dropped: bool, text: str
) -> None:
    folder = make_folder(tmp_path, "{{ tools | length if tools else 'none' }}")
    body = chat(USER, tools=TOOLS[:2], tool_choice="none")
    assert rendered(folder, body, "vllm", tools_dropped=dropped) == text
    assert rendered(folder, body, "sglang") == "none"
