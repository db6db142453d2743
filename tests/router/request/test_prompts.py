"""Tokens with a proof: the facade with real children and engines over real HTTP."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from typing_extensions import override

from events.engines.access import EngineAccess
from router.request import bodies, tokens
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.proving.canaries import canaries
from router.request.proving.engine_tokens import EngineAway, EngineRefused, Engines
from router.request.proving.proof import Difference, State, Target
from router.request.refusal import Reason
from router.request.rendering.renderer import Renderer
from router.request.tokens import CANARIES_MAX, MadeBy, ModelPrompts, PromptAsk, Prompts, Source
from tests.stage.prompts.engine import CHAT, StandIn, chat, quiet, serving
from tests.stage.prompts.renderers import OTHER_TEMPLATE, of_template
from tests.stage.waiting import until

TARGET = Target("vllm", "0.32.0")


@asynccontextmanager
async def facade(model: ModelPrompts | None = None, **more: Any) -> AsyncIterator[Prompts]:
    prompts = Prompts({} if model is None else {"m": model}, **more)
    try:
        yield prompts
    finally:
        await prompts.close()


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    engines = Engines()
    yield engines
    await engines.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("same"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("other"), OTHER_TEMPLATE)


def model(folder: RendererSettings | None, **more: Any) -> ModelPrompts:
    return ModelPrompts(renderer=folder, **{"processes": 1, "audit_share": 0.0, **more})


async def test_canaries_prove_the_shapes_of_an_engine_that_agrees(folder: RendererSettings) -> None:
    async with serving(StandIn(folder)) as engine, facade(model(folder)) as prompts:
        first = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        assert (first.made_by, first.verified) == (MadeBy.ENGINE, True)
        await quiet(prompts)
        asked = len(engine.asked)
        second = await prompts.tokens_of(PromptAsk("m", CHAT, chat("again"), engine.at()))
        assert (second.made_by, second.verified, second.shape) == (MadeBy.LOCAL, True, "chat")
        assert second.digest
        assert len(engine.asked) == asked, "a proven shape costs the engine nothing"
        assert {state for _, _, _, trust in prompts.proof for state in (trust.state,)} == {
            State.PROVEN
        }
        assert prompts.made[MadeBy.LOCAL, CHAT] == 1


async def test_another_template_is_noticed_and_the_engines_tokens_are_taken(
    folder: RendererSettings, other: RendererSettings
) -> None:
    async with serving(StandIn(other)) as engine, facade(model(folder)) as prompts:
        for _ in range(2):
            made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
            await quiet(prompts)
            assert (made.made_by, made.verified, made.own) == (MadeBy.ENGINE, True, None)
        barred = {shape: difference for _, shape, difference in prompts.proof.barred("m")}
        assert barred["chat"].at is not None
        assert prompts.differences["m"] >= 2
        engine.answer = lambda: web.Response(status=503)
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        assert made.made_by is MadeBy.ESTIMATE
        assert made.reason.startswith("RENDERER_UNAVAILABLE: the router's own tokens differed")


@pytest.mark.parametrize("order", [("same", "odd"), ("odd", "same")])
async def test_two_workers_of_other_tokens_are_told_apart(
    folder: RendererSettings, other: RendererSettings, order: tuple[str, ...]
) -> None:
    async with (
        serving(StandIn(folder)) as same,
        serving(StandIn(other)) as odd,
        facade(model(folder)) as prompts,
    ):
        at = {"same": same.at("same/1"), "odd": odd.at("odd/1")}
        for worker in order:
            await prompts.tokens_of(PromptAsk("m", CHAT, chat(), at[worker]))
            await quiet(prompts)
        assert prompts.is_odd("m", at["odd"])
        assert not prompts.is_odd("m", at["same"])
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), at["same"]))
        assert (made.made_by, made.verified) == (MadeBy.LOCAL, True)
        assert prompts.on_pick("r1", made, "same").verified
        assert not prompts.on_pick("r2", made, "odd").verified
        prompts.on_answer("r2", made.count + 3)
        assert prompts.proof.state("m", TARGET, "chat") is State.PROVEN
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), at["odd"]))
        assert (made.made_by, made.own) == (MadeBy.ENGINE, None)  # no other worker is there
        prompts.on_pick("r3", await prompts.tokens_of(PromptAsk("m", CHAT, chat(), at["same"])))
        prompts.on_answer("r3", made.count + 3)
        assert prompts.proof.state("m", TARGET, "chat") is State.BARRED


async def test_an_answer_with_another_count_bars_its_shape(folder: RendererSettings) -> None:
    async with serving(StandIn(folder)) as engine, facade(model(folder)) as prompts:
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        await quiet(prompts)
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        prompts.on_pick("r1", made)
        prompts.on_pick("r2", made)
        prompts.on_answer("r1", made.count)
        prompts.on_answer("unknown", 7)
        assert prompts.proof.state("m", TARGET, "chat") is State.PROVEN
        prompts.on_answer("r2", made.count + 1)
        prompts.on_answer("r2", made.count + 2)
        assert prompts.proof.state("m", TARGET, "chat") is State.BARRED
        difference = Difference(None, made.count, made.count + 1)
        assert prompts.proof.barred("m") == [(TARGET, "chat", difference)]
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        assert (made.made_by, made.own) == (MadeBy.ENGINE, None)
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at("w0/2")))
        await quiet(prompts)  # the engine was restarted, and its canaries pass
        assert prompts.proof.state("m", TARGET, "chat") is State.PROVEN


async def test_an_audit_notices_what_changed_without_a_restart(
    folder: RendererSettings, other: RendererSettings
) -> None:
    settings = model(folder, audit_share=0.5)
    shares = iter([0.7, 0.2])
    async with (
        serving(StandIn(folder)) as engine,
        facade(settings, random_share=lambda: next(shares)) as prompts,
    ):
        await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        await quiet(prompts)
        engine.renderer = Renderer(other)
        for state in (State.PROVEN, State.BARRED):
            made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
            assert made.made_by is MadeBy.LOCAL
            await quiet(prompts)
            assert prompts.proof.state("m", TARGET, "chat") is state


@pytest.mark.parametrize("require", [False, True])
async def test_without_tokens_the_length_is_estimated_or_the_prompt_refused(require: bool) -> None:
    async with facade() as prompts:
        ask = PromptAsk("m", bodies.TEXT, b"x" * 100, None, require=require)
        if not require:
            made = await prompts.tokens_of(ask)
            assert (made.made_by, made.count, made.verified) == (MadeBy.ESTIMATE, 25, False)
            assert made.reason.startswith("NO_TOKENIZER: no tokenizer is configured")
            assert prompts.estimates == {("NO_TOKENIZER", bodies.TEXT): 1}
            return
        with pytest.raises(PromptError) as caught:
            await prompts.tokens_of(ask)
        assert caught.value.reason is Reason.NO_TOKENIZER


async def test_a_body_that_is_wrong_is_refused_though_no_tokens_are_required(
    folder: RendererSettings,
) -> None:
    async with serving(StandIn(folder)) as engine, facade(model(folder)) as prompts:
        for at in (None, engine.at()):
            with pytest.raises(PromptError) as caught:
                await prompts.tokens_of(PromptAsk("m", CHAT, b'{"messages": 7}', at))
            assert caught.value.reason is Reason.MALFORMED_BODY


async def test_sources_as_configured_or_as_the_caller_wants(
    folder: RendererSettings, other: RendererSettings
) -> None:
    async with serving(StandIn(other)) as engine, facade(model(folder)) as prompts:

        async def made(source: Source) -> Any:
            return await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at(), source=source))

        assert (await made(Source.LOCAL)).made_by is MadeBy.LOCAL
        assert prompts.unverified == 1
        assert not (await made(Source.LOCAL)).verified
        assert prompts.unverified == 2
        assert (await made(Source.ENGINE)).made_by is MadeBy.ENGINE
        assert (await made(Source.OFF)).reason.startswith("NO_TOKENIZER: this router")


async def test_a_model_without_a_folder_has_its_engines_tokens(folder: RendererSettings) -> None:
    async with serving(StandIn(folder)) as engine, facade() as prompts:
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        assert (made.made_by, made.verified, made.digest) == (MadeBy.ENGINE, True, "")
        await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        assert engine.asked == ["/v1/chat/completions/render", "/tokenize", "/tokenize"]


async def test_a_render_endpoint_that_an_engine_lacks_says_nothing_about_its_others(
    folder: RendererSettings, engines: Engines
) -> None:
    messages, chats = "/v1/messages/render", "/v1/chat/completions/render"
    stand_in = StandIn(folder, renders=True, lacks=frozenset({messages}))
    async with serving(stand_in) as engine:
        for _ in range(2):
            with suppress(EngineAway):
                await engines.ask(engine.access, "vllm", bodies.MESSAGES, chat(), "m")
            made = await engines.ask(engine.access, "vllm", CHAT, chat(), "m")
            assert made.token_bytes
        assert stand_in.asked == [messages, chats, chats]
        engines.forget(engine.address)
        with pytest.raises(EngineAway, match="messages"):
            await engines.ask(engine.access, "vllm", bodies.MESSAGES, chat(), "m")
        assert stand_in.asked[3:] == [messages]


async def test_a_reload_takes_proofs_back_and_runs_canaries_again(
    folder: RendererSettings, other: RendererSettings
) -> None:
    async with serving(StandIn(folder)) as engine, facade(model(folder)) as prompts:
        ask = PromptAsk("m", CHAT, chat(), engine.at())
        await prompts.tokens_of(ask)
        await quiet(prompts)
        prompts.configure({"m": model(other)})
        assert not prompts._children
        assert prompts.proof.state("m", TARGET, "chat") is State.UNPROVEN
        made = await prompts.tokens_of(ask)
        assert made.made_by is MadeBy.ENGINE
        await quiet(prompts)
        assert prompts.proof.state("m", TARGET, "chat") is State.BARRED
        prompts.configure({"m": model(folder)})
        await prompts.tokens_of(ask)
        await quiet(prompts)
        assert prompts.proof.state("m", TARGET, "chat") is State.PROVEN


async def test_a_prompt_that_waits_while_its_model_is_reloaded_is_rendered_again(
    folder: RendererSettings, other: RendererSettings
) -> None:
    async with facade(model(folder, source=Source.LOCAL)) as prompts:
        ask = PromptAsk("m", CHAT, chat(), None, require=True)
        before = await prompts.tokens_of(ask)
        (pid,) = prompts._children["m"].pids
        os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(prompts.tokens_of(ask)) for _ in range(3)]
        await until(lambda: prompts.waiting == 3, "one rendered, two that wait")
        prompts.configure({"m": model(other, source=Source.LOCAL)})
        for after in await asyncio.gather(*waiting):
            assert after.made_by is MadeBy.LOCAL
            assert after.digest == prompts.digests["m"] != before.digest


async def test_a_render_service_gives_tokens_and_items(folder: RendererSettings) -> None:
    service = StandIn(folder, renders=True)
    async with serving(service) as at, facade(ModelPrompts(render=at.address)) as prompts:
        made = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), None))
        assert made.made_by is MadeBy.ENGINE
        assert [(item.first_token, item.token_count) for item in made.items] == [(1, 2)]
        assert made.items[0].id == "ab" * 32


async def test_of_workers_that_give_no_tokens_the_latest_are_remembered(
    folder: RendererSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "WORKERS_MAX", 2)
    engine = StandIn(folder)
    engine.answer = lambda: web.Response(status=404)
    async with serving(engine), facade() as prompts:
        for worker_id in ("gone", "here", "here", "gone", "here", "new"):
            at = engine.at(f"{worker_id}/1")
            await prompts.tokens_of(PromptAsk("m", CHAT, chat(), at, source=Source.ENGINE))
        assert list(prompts.lacking) == [("m", "here"), ("m", "new")]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda: web.Response(status=503), EngineAway, "HTTP status 503"),
        (lambda: web.Response(status=302, headers={"Location": "/"}), EngineAway, "302"),
        (lambda: web.Response(text="no JSON"), EngineAway, "gave no tokens"),
        (lambda: web.json_response({"tokens": [-1]}), EngineAway, "gave no tokens"),
        (lambda: web.json_response({"tokens": [1 << 32]}), EngineAway, "gave no tokens"),
        (lambda: web.json_response({"error": "bad"}, status=400), EngineRefused, "bad"),
    ],
)
async def test_an_answer_that_is_no_tokens_is_an_error_and_never_tokens(
    folder: RendererSettings,
    answer: Callable[[], web.Response],
    error: type[Exception],
    message: str,
    engines: Engines,
) -> None:
    async with serving(StandIn(folder)) as engine:
        engine.answer = answer
        with pytest.raises(error, match=message):
            await engines.ask(engine.access, "sglang", CHAT, chat(), "m")
        engine.answer = None
        with pytest.raises(EngineAway, match="within 0 s"):
            await engines.ask(engine.access, "sglang", CHAT, chat(), "m", left_s=0.0)
    with pytest.raises(EngineAway):
        await engines.ask(EngineAccess("http://127.0.0.1:1"), "sglang", CHAT, chat(), "m")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CHAT, {"messages": [], "reasoning_effort": "high"}),
        (bodies.COMPLETION, {"prompt": ["a", "b"]}),
        (bodies.COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 3}),
        (bodies.MESSAGES, {"messages": []}),
        (bodies.RESPONSES, {"input": "a"}),
    ],
)
async def test_what_tokenize_would_read_otherwise_is_not_sent_to_it(
    folder: RendererSettings, kind: bodies.BodyFormat, body: dict[str, Any], engines: Engines
) -> None:
    content = json.dumps(body).encode()
    async with serving(StandIn(folder)) as engine:
        with pytest.raises(EngineAway):
            await engines.ask(engine.access, "vllm", kind, content, "m")
        assert "/tokenize" not in engine.asked


async def test_sglang_is_not_sent_what_only_its_tokenize_reads(
    folder: RendererSettings, engines: Engines
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    sent = []

    class Listening(StandIn):
        @override
        async def tokenize(self, request: web.Request) -> web.Response:
            sent.append(await request.json())
            return web.json_response({"tokens": [1]})

    async with serving(Listening(folder)) as engine:
        content = json.dumps(body).encode()
        await engines.ask(engine.access, "sglang", CHAT, content, "m")
    assert sent == [{"messages": messages, "continue_final_message": True}]


@pytest.mark.parametrize(
    ("tool", "is_sent"),
    [
        ({"type": "function", "function": {"name": "n"}}, True),
        ({"function": {"name": "n", "description": "d", "parameters": {}, "x": None}}, True),
        ({"function": {"name": "n", "defer_loading": True}, "defer_loading": True}, True),
        ({"function": {"name": "n", "description": None, "parameters": {}}}, False),
        ({"function": {"name": "n", "description": "d"}, "defer_loading": True}, False),
        (7, True),
    ],
)
async def test_sglang_is_not_sent_tools_that_its_tokenize_reorders(
    folder: RendererSettings, tool: object, is_sent: bool, engines: Engines
) -> None:
    engine = StandIn(folder)
    engine.answer = lambda: web.json_response({"tokens": [1]})
    content = json.dumps({"messages": [], "tools": [tool]}).encode()
    async with serving(engine):
        if is_sent:
            await engines.ask(engine.access, "sglang", CHAT, content, "m")
        else:
            with pytest.raises(EngineAway, match="reorders"):
                await engines.ask(engine.access, "sglang", CHAT, content, "m")
    assert bool(engine.asked) == is_sent


def test_there_are_twenty_canaries_of_many_shapes(folder: RendererSettings) -> None:
    renderer = Renderer(folder)
    bodies = canaries("m")
    shapes = set()
    for kind, content in bodies:
        shapes.add(renderer.render(kind, content, "vllm").shape)
    assert len(bodies) == 20
    assert len(shapes) >= 15, shapes


class Slow(StandIn):
    """Answers when the test lets it."""

    def __init__(self, settings: RendererSettings) -> None:
        super().__init__(settings)
        self.go = asyncio.Event()
        self.waiting = 0

    @override
    async def tokenize(self, request: web.Request) -> web.Response:
        self.waiting += 1
        await self.go.wait()
        self.waiting -= 1
        return await super().tokenize(request)


async def test_canaries_of_a_configuration_that_is_gone_prove_nothing(
    folder: RendererSettings, other: RendererSettings
) -> None:
    slow = Slow(folder)
    async with serving(slow) as engine, facade(model(folder)) as prompts:
        ask = PromptAsk("m", CHAT, chat(), engine.at(), source=Source.LOCAL)
        prompts.on_pick("r", await prompts.tokens_of(ask))
        await until(lambda: slow.waiting == 1, "one waits")
        prompts.configure({"m": model(other)})
        slow.go.set()
        await quiet(prompts)
        prompts.on_answer("r", 1)
        assert not list(prompts.proof)
        assert not prompts.digests


async def test_an_engines_tokens_prove_nothing_if_the_configuration_changed_meanwhile(
    folder: RendererSettings, other: RendererSettings
) -> None:
    slow = Slow(folder)
    settings = model(folder, source=Source.LOCAL)  # so that no canaries run
    async with serving(slow) as engine, facade(settings) as prompts:
        ask = PromptAsk("m", CHAT, chat(), engine.at(), source=Source.AUTO)
        made = asyncio.create_task(prompts.tokens_of(ask))
        await until(lambda: slow.waiting == 1, "one waits")
        prompts.configure({"m": model(other, source=Source.LOCAL)})
        slow.go.set()
        assert (await made).made_by is MadeBy.ENGINE
        assert (await made).own is None
        assert not list(prompts.proof)


async def test_canaries_of_few_workers_run_at_once(folder: RendererSettings) -> None:
    slow = Slow(folder)
    async with serving(slow) as engine, facade(model(folder)) as prompts:
        for number in range(3 * CANARIES_MAX):
            ask = PromptAsk("m", CHAT, chat(), engine.at(f"w{number}/1"), source=Source.LOCAL)
            await prompts.tokens_of(ask)
        await until(lambda: slow.waiting == CANARIES_MAX, f"{CANARIES_MAX} wait")
        assert prompts.waiting == 0, "the others have not begun"
        slow.go.set()
        await quiet(prompts)
        assert len(slow.asked) >= 3 * CANARIES_MAX * len(canaries("m"))


async def test_canaries_without_an_answer_run_again_later(
    folder: RendererSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.request.tokens.CANARIES_AGAIN_S", 0.0)
    async with serving(StandIn(folder)) as engine, facade(model(folder)) as prompts:
        ask = PromptAsk("m", CHAT, chat(), engine.at(), source=Source.LOCAL)
        engine.answer = lambda: web.Response(status=503)
        await prompts.tokens_of(ask)
        await quiet(prompts)
        assert prompts.proof.state("m", TARGET, "chat") is State.UNPROVEN
        engine.answer = None
        await prompts.tokens_of(ask)
        await quiet(prompts)
        assert prompts.proof.state("m", TARGET, "chat") is State.PROVEN
        asked = len(engine.asked)
        await prompts.tokens_of(ask)
        await quiet(prompts)
        assert len(engine.asked) == asked


async def test_a_barred_shape_is_in_the_log_once(
    folder: RendererSettings, other: RendererSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = model(folder, source=Source.LOCAL)  # so that no canaries run
    async with serving(StandIn(other)) as engine, facade(settings) as prompts:
        ask = PromptAsk("m", CHAT, chat(), engine.at(), source=Source.AUTO)
        local = await prompts.tokens_of(PromptAsk("m", CHAT, chat(), engine.at()))
        prompts.on_pick("before", local)
        for _ in range(3):
            assert (await prompts.tokens_of(ask)).made_by is MadeBy.ENGINE
        assert prompts.differences["m"] == 1
        prompts.on_answer("before", local.count + 5)
        assert prompts.differences["m"] == 2
        assert len([one for one in caplog.records if "other tokens" in one.message]) == 1
