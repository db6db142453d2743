"""Whatever an engine answers when it is asked for a prompt's tokens, the prompt is routed."""

import asyncio
import logging
import random
from array import array
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from events.engines.access import EngineAccess
from router.request import bodies
from router.request.dialects.table import DIALECTS
from router.request.proving import engine_tokens
from router.request.proving.engine_tokens import (
    ASK_S,
    LONG_BYTES,
    QUESTIONS_MAX,
    TOKENS_BESIDE_MAX,
    UNUSABLE_MAX,
    EngineAway,
    EngineRefused,
    Engines,
    EngineTokens,
)
from router.request.tokens import ModelPrompts
from tests.stage.gateway import Worker, a_gateway, answering
from tests.stage.odd_engine import Odd, OddEngine, odd_answer, plain, whole
from tests.stage.prompts.engine import CHAT, chat

ANSWERS = 30
"""Of a seed."""
DONE = {"id": "c", "object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 1}}
EVIL = 666_666
GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""


@pytest.mark.parametrize("seed", range(12))
async def test_every_answer_ends_in_tokens_of_the_bodys_size_or_in_a_reason(seed: int) -> None:
    rng = random.Random(seed)
    outcomes = Counter[str]()
    odd = OddEngine(lambda _: odd_answer(rng))
    engines = Engines(ask_s=0.2)
    async with odd.run():
        for number in range(ANSWERS):
            engine = rng.choice(("vllm", "sglang"))
            kind = rng.choice((CHAT, bodies.COMPLETION))
            content = chat("x" * rng.randrange(200)) if kind is CHAT else b'{"prompt":"a"}'
            engines.forget(odd.address)
            try:
                async with asyncio.timeout(GUARD_S):
                    made = await engines.ask(EngineAccess(odd.address), engine, kind, content, "m")
            except (EngineAway, EngineRefused) as error:
                outcomes[type(error).__name__] += 1
                continue
            outcomes["tokens"] += 1
            count = len(made.token_bytes) // 4
            assert 0 < count <= len(content) + TOKENS_BESIDE_MAX, f"seed {seed}, answer {number}"
            assert len(made.token_bytes) == 4 * count
            end = 0
            for item in made.items:
                assert end <= item.first_token < item.first_token + item.token_count <= count
                end = item.first_token + item.token_count
        assert engines._answer_bytes == 0
        assert not any(engine.questions for engine in engines._engines.values())
        await engines.close()
    assert outcomes["EngineAway"], f"seed {seed}: {outcomes}"


@pytest.mark.parametrize("seed", range(6))
async def test_a_chat_is_served_whatever_one_engine_answers_to_the_router(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    named = Counter[str]()

    def answer(path: str) -> Odd:
        if path in ("/v1/chat/completions", "/v1/messages", "/v1/completions"):
            return plain(DONE)
        odd = odd_answer(rng)
        named[odd.name] += 1
        return odd

    odd, good = OddEngine(answer), Worker(answering(b'{"choices":[]}'))
    paths: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ]
    with caplog.at_level(logging.WARNING):
        async with odd.run(), a_gateway(good, prompts=ModelPrompts(), in_process=True) as stage:
            stage.add("odd", odd.address)
            await stage.gateway.roster.refresh()
            for number in range(ANSWERS):
                path, body = rng.choice(paths)
                stage.served.texts.prompts._engines.forget(odd.address)
                async with stage.post(path, {"model": "m", "seed": number, **body}) as response:
                    text = await response.text()
                    assert response.status == 200, f"seed {seed}, {number}: {text}, {named}"
            await stage.until(lambda: not stage.open)
    assert named, f"seed {seed}: the odd engine was not asked"
    assert not [record for record in caplog.records if record.exc_info], caplog.text


@pytest.mark.parametrize("seed", range(4))
async def test_tokens_that_one_engine_gave_go_to_no_other(seed: int) -> None:
    rng = random.Random(seed)

    def answer(path: str) -> Odd:
        if path == "/v1/chat/completions":
            return plain(DONE)
        ids = [EVIL, *(rng.randrange(1 << 32) for _ in range(rng.randrange(1, 80)))]
        if path.endswith("/render"):
            return rng.choice((plain({"token_ids": ids}), Odd("", (whole(b"", "404 No"),))))
        return plain({"tokens": ids})

    odd, good = OddEngine(answer), Worker(answering(b'{"choices":[]}'))
    async with odd.run(), a_gateway(good, prompts=ModelPrompts(), forward="tokens") as stage:
        stage.add("odd", odd.address)
        await stage.gateway.roster.refresh()
        for number in range(ANSWERS):
            messages = [{"role": "user", "content": f"hello {number} {rng.random()}"}]
            body = {"model": "m", "messages": messages}
            async with stage.post("/v1/chat/completions", body) as response:
                assert response.status == 200
    assert any(str(EVIL).encode() in body for body in odd.bodies), "its own tokens go to it"
    assert good.bodies
    assert not [body for body in good.bodies if str(EVIL).encode() in body]


async def test_an_engine_of_unusable_answers_rests_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable = False
    odd = OddEngine(lambda _: plain({"tokens": [1, 2]} if usable else {"tokens": "x"}))
    engines, rests = Engines(), []
    monkeypatch.setattr(engine_tokens, "REST_S", 100.0)
    monkeypatch.setattr(engine_tokens, "REST_MAX_S", 400.0)

    async def ask() -> EngineTokens:
        access = EngineAccess(odd.address)
        return await engines.ask(access, "sglang", CHAT, chat(), "m")

    async with odd.run():
        for number in range(UNUSABLE_MAX + 3):
            assert not engines.rests(odd.address)
            with pytest.raises(EngineAway, match="gave no tokens"):
                await ask()
            assert engines.rests(odd.address) == (number >= UNUSABLE_MAX - 1)
            rests.append(engines._engines[odd.address].rest_s)
            if engines.rests(odd.address):
                asked = len(odd.asked)
                with pytest.raises(EngineAway, match="so it rests"):
                    await ask()
                assert len(odd.asked) == asked
            engines._engines[odd.address].until_s = 0.0  # the rest is over
        assert rests == [0.0, 100.0, 200.0, 400.0, 400.0]
        assert engines.unusable == len(rests)
        usable = True
        assert array("I", (await ask()).token_bytes).tolist() == [1, 2]
        assert not engines._engines[odd.address].unusable
        await engines.close()
    assert ASK_S < 1.0


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (bodies.TEXT, b"\xff"),
        (bodies.COMPLETION, b'{"prompt": "\xff"}'),
        (bodies.COMPLETION, b'{"\xff": 1, "prompt": "a"}'),
        (bodies.COMPLETION, b'{"prompt": ' + b"[" * 200_000),
        (CHAT, b'{"messages": [], "\xff": 1}'),
        (CHAT, b'{"messages": [], "tools": "\xff"}'),
        (CHAT, b'{"messages": ' + b"[" * 2_000 + b"]" * 2_000 + b"}"),
        (CHAT, b'{"messages": [], "tools": ' + b"[" * 2_000 + b"]" * 2_000 + b"}"),
    ],
)
async def test_bodies_that_can_t_be_read_have_no_engine_rest(
    engine: str, kind: bodies.BodyFormat, content: bytes
) -> None:
    no_render = Odd("", (whole(b"", "404 No"),), closes=False)
    odd = OddEngine(lambda path: no_render if "render" in path else plain({"tokens": [1]}))
    engines = Engines()
    async with odd.run():
        for _ in range(UNUSABLE_MAX):
            with suppress(EngineAway, EngineRefused):
                await engines.ask(EngineAccess(odd.address), engine, kind, content, "m")
        assert not engines.rests(odd.address)
        assert not engines.unusable
        await engines.close()


@pytest.mark.parametrize(("size", "rests"), [(100, True), (LONG_BYTES + 1, False)])
async def test_an_engine_that_is_late_rests_unless_the_bodies_are_long(
    size: int, rests: bool
) -> None:
    hangs = OddEngine(lambda _: Odd("", (), closes=False))
    engines = Engines(ask_s=0.01)
    async with hangs.run():
        for _ in range(UNUSABLE_MAX):
            with pytest.raises(EngineAway, match="within"):
                await engines.ask(EngineAccess(hangs.address), "vllm", CHAT, bytes(size), "m")
        assert engines.rests(hangs.address) == rests
        assert engines.unusable == UNUSABLE_MAX
        await engines.close()


async def test_one_engine_that_hangs_takes_no_turn_of_another() -> None:
    hangs = OddEngine(lambda _: Odd("", (), closes=False))
    good = OddEngine(lambda _: plain({"tokens": [1]}))
    engines = Engines(ask_s=GUARD_S)
    async with hangs.run(), good.run():
        at = EngineAccess(hangs.address)
        waiting = [
            asyncio.create_task(engines.ask(at, "sglang", CHAT, chat(), "m"))
            for _ in range(3 * QUESTIONS_MAX)
        ]
        made = await engines.ask(EngineAccess(good.address), "sglang", CHAT, chat(), "m")
        assert made.token_bytes
        assert len(hangs.asked) <= QUESTIONS_MAX
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await engines.close()
    assert not any(engine.questions for engine in engines._engines.values())
