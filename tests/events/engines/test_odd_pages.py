"""Whatever an engine's pages hold, their reader ends with an Answer; its heartbeat is readable."""

import asyncio
import random
from collections import Counter

import pytest

from events.engines.access import EngineAccess
from events.engines.connections import INTERIM_MAX
from events.engines.pages.load import EngineIdentity
from events.engines.pages.probe import Answer, EngineHttp, EngineSilent, Probe
from events.engines.sessions import http_session
from events.plane.facts import Epoch, Heartbeat, decode, encode
from tests.stage.odd_engine import Odd, OddEngine, odd_answer, plain, whole

ANSWERS = 10
"""Of a seed and a page."""
GUARD_S = 60.0
"""What hangs fails; nothing waits this long."""


def heartbeat(identity: EngineIdentity) -> Heartbeat:
    return Heartbeat(
        epoch=Epoch(1, 1),
        address="a",
        engine="vllm",
        engine_version=identity.version or "",
        model=identity.model or "",
        model_aliases=identity.aliases,
        lora_names=identity.lora_names,
        max_model_len=identity.max_model_len or 0,
        total_slots=identity.total_slots,
        token_budget=identity.token_budget,
        sent_at_s=1.0,
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("seed", range(4))
async def test_every_page_ends_in_an_answer(seed: int, engine: str) -> None:
    rng = random.Random(f"{engine} {seed}")
    odd = OddEngine(lambda _: odd_answer(rng))
    counts = Counter[str]()
    async with odd.run(), http_session() as session:
        access = EngineAccess(odd.address, timeout_s=0.1)
        probe = Probe(session, engine, access, odd.address, counts)
        for number in range(ANSWERS):
            async with asyncio.timeout(GUARD_S):
                answers = await asyncio.gather(
                    probe.ask_identity(whole=rng.random() < 0.5), probe.ask_load()
                )
                assert isinstance(await probe.ask_mooncake(), bool)
            assert all(isinstance(answer, Answer) for answer in answers), f"{seed}, {number}"
            assert all(answers) or probe.trouble
            if probe.identity is not None:
                read = decode(Heartbeat, encode(heartbeat(probe.identity)))
                assert isinstance(read, Heartbeat), f"{seed}, {number}: {read}"
    assert counts["malformed_page"]


async def test_an_odd_optional_page_leaves_the_rest_known() -> None:
    rng = random.Random(1)
    models = plain({"data": [{"id": "m", "max_model_len": 9}]})
    odd = OddEngine(lambda path: models if path == "/v1/models" else odd_answer(rng))
    async with odd.run(), http_session() as session:
        probe = Probe(session, "vllm", EngineAccess(odd.address, timeout_s=0.1))
        for _ in range(ANSWERS):
            answer = await probe.ask_identity()
            if answer is Answer.NONE:
                continue  # a refused connection: the engine may be gone
            assert answer
            assert probe.identity is not None
            assert (probe.identity.model, probe.identity.max_model_len) == ("m", 9)


async def test_interim_heads_without_end_are_no_answer() -> None:
    body, interim = b'{"data":[]}', b"HTTP/1.1 103 Early Hints\r\n\r\n"
    engine = OddEngine(lambda _: Odd("", (), closes=False))
    async with engine.run(), http_session() as session:
        reader = EngineHttp(session, EngineAccess(engine.address, timeout_s=GUARD_S))
        engine.next = lambda _: Odd("", (interim * INTERIM_MAX + whole(body),))
        assert await reader.page("/v1/models") == body
        for more in (whole(body), b""):
            engine.next = lambda _, more=more: Odd(  # type: ignore[misc]
                "", (interim * (INTERIM_MAX + 1) + more,), closes=False
            )
            with pytest.raises(EngineSilent, match="interim answers"):
                await reader.page("/v1/models")
        engine.next = lambda _: Odd("", (interim * 500,), forever=True)
        with pytest.raises(EngineSilent, match="interim answers"):
            await reader.page("/v1/models")
