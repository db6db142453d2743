"""`kvroute explain` for texts and bodies: a real router, with real children or an HTTP engine."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from router.api.service.fleet_service import FleetService
from router.app.calls.dialing import CallFailed
from router.app.calls.explanation import BodyFile, Question, show_explanation
from router.app.calls.questions import explain
from router.request.prompt_settings import RendererSettings
from router.request.refusal import Reason, Refusal
from router.request.rendering.renderer import Renderer
from router.request.tokens import ModelPrompts
from tests.stage.prompts.engine import CHAT, StandIn, chat, serving
from tests.stage.prompts.renderers import OTHER_TEMPLATE, local, of_template
from tests.stage.served import Served, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("other"), OTHER_TEMPLATE)


@asynccontextmanager
async def routed(
    *, address: str = "", engine: str = "vllm", **models: ModelPrompts
) -> AsyncIterator[Served]:
    async with served(models_prompts=models) as stage:
        stage.fleet.add("w0", address=address, engine=engine)
        yield stage


def of_chat(body: bytes = chat(), **about: Any) -> Question:
    return Question(bodies={"chat_completion_body": BodyFile("chat.json", body)}, **about)


async def explained(stage: Served, question: Question, **about: Any) -> int:
    target = f"127.0.0.1:{stage.server.port}"
    return await show_explanation(target, question, timeout_s=60.0, **about)


async def test_a_chat_s_tokens_stand_before_the_workers(
    folder: RendererSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Renderer(folder).render(CHAT, chat(), "vllm")
    async with routed(m=local(folder)) as stage:
        assert await explained(stage, of_chat()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        f"tokens     {done.count}, made by the router, not verified",
        "shape      chat",
        f"tokenizer  {Renderer(folder).digest}",
        "",
    ]
    assert f", {done.count} prompt tokens" in lines[4]
    assert any(line.startswith("->  w0/0") for line in lines)


async def test_tokens_are_compared_with_those_of_an_engine(
    folder: RendererSettings, other: RendererSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    same, different = StandIn(folder), StandIn(other)
    async with (
        serving(same),
        serving(different),
        routed(m=local(folder), address=same.address) as stage,
    ):
        assert await explained(stage, of_chat(), against=same.address) == 0
        assert "engine     the same " in capsys.readouterr().out
        assert await explained(stage, of_chat(), against=different.address) == 1
        out = capsys.readouterr().out
        assert "tokens; the first that differs is token " in out
        assert "\n  here     [" in out
        question = Question(text="hello", model="m")
        assert await explained(stage, question, against=same.address) == 0
        with pytest.raises(click.ClickException, match="gave no tokens"):
            await explained(stage, of_chat(), against="http://127.0.0.1:1")
        question = Question(text="hello", model="m", tokenize="http://127.0.0.1:1/")
        with pytest.raises(click.ClickException, match="gave no tokens"):
            await explained(stage, question)
        with pytest.raises(click.UsageError, match="--against"):
            await explained(stage, Question(tokens="1,2"), against=same.address)


async def test_an_engine_is_asked_as_its_kind_is(
    folder: RendererSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang has no render endpoints, which vLLM's are tried first."""
    engine = StandIn(folder)
    async with (
        serving(engine),
        routed(m=local(folder), address=engine.address, engine="sglang") as stage,
    ):
        for against in (f"{engine.address}/", engine.address.replace("127.0.0.1", "localhost")):
            assert await explained(stage, of_chat(), against=against) == 0
    assert engine.asked == ["/tokenize", "/tokenize"]


async def test_where_workers_can_t_be_listed_no_engine_is_called_by_a_guess_of_its_kind(
    folder: RendererSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_self: FleetService, _request: object, _context: object) -> None:
        raise Refusal(Reason.PERMISSION_DENIED, "the key lacks the right")

    monkeypatch.setattr(FleetService, "ListWorkers", refused)
    engine = StandIn(folder)
    async with (
        serving(engine),
        routed(m=local(folder), address=engine.address, engine="sglang") as stage,
    ):
        with pytest.raises(CallFailed, match="PERMISSION_DENIED: the key lacks the right"):
            await explained(stage, of_chat(), against=engine.address)
    assert not engine.asked


async def test_a_prompt_without_tokens_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    async with routed() as stage:
        assert await explained(stage, of_chat()) == 0
        about, why, *_ = capsys.readouterr().out.splitlines()
        assert about.startswith(f"tokens     about {len(chat()) // 4}, an estimate: ")
        assert why.startswith("why        NO_TOKENIZER: no tokenizer is configured for model 'm'")
        with pytest.raises(click.ClickException, match="no tokens to compare"):
            await explained(stage, of_chat(), against="http://127.0.0.1:1")


async def test_a_router_without_the_packages_for_prompts_names_them(
    folder: RendererSettings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("fastokens", "tokenizers"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('none', name='{name}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with routed(m=local(folder)) as stage:
        assert await explained(stage, of_chat()) == 0
    assert "pip install 'kvroute[prompts]'" in capsys.readouterr().out


async def test_refusals_are_one_line(folder: RendererSettings) -> None:
    async with routed(m=local(folder)) as stage:
        for question, sentence in (
            (of_chat(b'{"model": "none", "messages": []}'), "UNKNOWN_MODEL: unknown model 'none'"),
            (of_chat(b'{"model": "m", "messages": 3}'), "MALFORMED_BODY: messages"),
            (of_chat(model="none"), "UNKNOWN_MODEL: "),
            (Question(text="", model="m"), "EMPTY_PROMPT: "),
        ):
            with pytest.raises(CallFailed) as caught:
                await explained(stage, question)
            (line,) = caught.value.message.splitlines()
            assert sentence in line


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "chat.json is no JSON: "),
        (b"", "chat.json is no JSON: "),
        (b"\xff", "chat.json is no JSON: "),
        (b"[" * 100_000, "chat.json is no JSON: "),
        (b"[]", "chat.json is JSON, but no object"),
        (b" " * ((32 << 20) + 1), "chat.json has 33554433 bytes, the limit is 33554432"),
    ],
)
async def test_a_file_that_is_no_body_is_named(content: bytes, sentence: str) -> None:
    with pytest.raises(click.ClickException, match=sentence) as caught:
        await show_explanation("127.0.0.1:1", of_chat(content, model="m"), timeout_s=1.0)
    assert "\n" not in caught.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give the prompt by one of --chat"),
        (("--text", "a", "--tokens", "1"), "give the prompt by one of --chat"),
        (("--chat", "FILE", "--text", "a"), "give the prompt by one of --chat"),
        (("--chat", "FILE", "--messages", "FILE"), "give the prompt by one of --chat"),
        (
            ("--tokens", "1", "--tokenize", "http://127.0.0.1:1"),
            "--tokenize is only for a prompt of --text",
        ),
        (("--chat", "FILE", "--against", "h:1", "--json"), "used together with --json"),
        (("--chat", "FILE", "--against", "ftp://h"), "expected http://HOST:PORT"),
        (("--chat", "no such file"), "does not exist"),
    ],
)
def test_flags_that_don_t_go_together_are_named(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(chat())
    words = [str(file) if word == "FILE" else word for word in arguments]
    result = CliRunner().invoke(explain, words)
    assert result.exit_code == 2
    assert sentence in result.output


async def test_json_has_the_prompt(
    folder: RendererSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    async with routed(m=local(folder)) as stage:
        assert await explained(stage, of_chat(), as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"]["source"] == "PROMPT_SOURCE_LOCAL"
    assert answer["workerId"] == "w0"
