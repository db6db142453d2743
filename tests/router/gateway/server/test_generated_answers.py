"""Answers of engines from a seed: whatever comes, the client is served by another engine, or gets
the answer itself; the gateway has no fault, and nothing stays open."""

import json
import logging
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.client import RetryBudgetPolicy
from kvroute.client.messages.pick import HAND_OVER_DEPTH_MAX
from router.gateway.server import hand_over
from tests.router.gateway.server.test_engine_answers import beside
from tests.router.gateway.server.test_gateway import BODY, CHAT, USAGE, WHOLE
from tests.router.gateway.server.test_pairs import HANDED, LONG, PREFILLED, VLLM, paired
from tests.stage.gateway import Stage, Worker, answering
from tests.stage.raw_engine import Asked, RawEngine, whole

ANSWERS = 100
"""Of each seed."""
HAND_OVERS = 150
SEED = 32
SEEDS = (6, SEED)
"""The first one has an answer at which aiohttp's own reader waits for ever."""
DEEP = 3000


def value(rng: random.Random, depth: int = 0) -> Any:
    """A value of JSON, of any type and any number."""
    kinds = (
        lambda: None,
        lambda: rng.choice((True, False)),
        lambda: rng.choice((0, -1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30)),
        lambda: rng.choice((0.0, -1.5, 1e308)),
        lambda: rng.choice(("", "x", "\x00", "\ud7ff", "x" * 5000)),
        lambda: [value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {str(n): value(rng, depth + 1) for n in range(rng.randrange(4))},
    )
    return rng.choice(kinds[:5] if depth > 3 else kinds)()


def nested(rng: random.Random, depth: int) -> bytes:
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return opening * depth + b"1" + closing * depth


def mutilated(rng: random.Random, content: bytes) -> bytes:
    """Cut off, with bytes that are no UTF-8, or with bytes exchanged."""
    at = rng.randrange(1, len(content))
    match rng.randrange(4):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + b"\xff\xfe" + content[at:]
        case 2:
            return b"\xef\xbb\xbf" + content
        case _:
            return content[:at] + rng.randbytes(3) + content[at + 3 :]


def handed_over(rng: random.Random) -> bytes:
    """The body of a prefill worker's answer."""
    good = {"usage": json.loads(USAGE), "kv_transfer_params": HANDED}
    match rng.randrange(9):
        case 0:
            return json.dumps(good | {"kv_transfer_params": value(rng)}).encode()
        case 1:
            return json.dumps(good | {"usage": value(rng)}).encode()
        case 2:
            return json.dumps(value(rng)).encode()
        case 3:
            depth = rng.choice((HAND_OVER_DEPTH_MAX + 1, 200, DEEP))
            return b'{"kv_transfer_params":{"a":' + nested(rng, depth) + b"}}"
        case 4:
            return b'{"kv_transfer_params":{"a":' + b"9" * rng.choice((20, 400, 6000)) + b"}}"
        case 5:
            blocks = b"1," * (rng.choice((10, hand_over.ANSWER_MAX)) // 2)
            return b'{"kv_transfer_params":{"a":[' + blocks + b"1]}}"
        case 6:
            return rng.choice((b"", b"null", b"NaN", b"<html>", b"{}", b'{"usage":[]}'))
        case _:
            return mutilated(rng, json.dumps(good).encode())


def depth_of(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((depth_of(item) for item in items if isinstance(item, (dict, list))), default=0)


async def test_a_hand_over_of_any_form_leaves_the_decode_worker_to_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = random.Random(SEED)
    given = b""

    async def answer(asked: Asked) -> bool:
        await asked.send(whole(given))
        return True

    prefill, decode = RawEngine(answer), Worker(answering(WHOLE))
    async with paired(prefill, decode, VLLM) as stage:
        for number in range(HAND_OVERS):
            given = handed_over(rng)
            response = await stage.ask(CHAT, LONG)
            about = f"hand-over {number} of seed {SEED}: {given[:100]!r}"
            assert (response.status, response.body) == (200, WHOLE), about
            params = json.loads(decode.bodies[-1]).get("kv_transfer_params", {})
            assert isinstance(params, dict), about
            assert depth_of(params) <= HAND_OVER_DEPTH_MAX, about
        assert len(prefill.asked) == len(decode.bodies) == HAND_OVERS
        unusable = stage.sample("kvroute_gateway_client_total", name="unusable_hand_overs")
        assert HAND_OVERS // 3 < unusable < HAND_OVERS
        await stage.until(lambda: stage.open == 0)
        outcomes = stage.served.fleet.core.endings
        assert [ending.value for ending, count in outcomes.items() if count] == ["finished"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("status", [400, 422, 500])
@pytest.mark.parametrize("own_mistake", [False, True])
async def test_a_hand_over_that_the_decode_worker_refuses_is_none(
    status: int, own_mistake: bool
) -> None:
    async def play(request: web.Request, body: bytes) -> web.StreamResponse:
        if own_mistake or b"remote_block_ids" in body:
            return web.Response(status=status, body=b'{"error":"remote_block_ids"}')
        return web.Response(body=WHOLE, headers={"Content-Type": "application/json"})

    prefill, decode = Worker(answering(PREFILLED)), Worker(play)
    async with paired(prefill, decode, VLLM) as stage:
        response = await stage.ask(CHAT, LONG)
        answer = response.status, response.body
        assert answer == (
            (status, b'{"error":"remote_block_ids"}') if own_mistake else (200, WHOLE)
        )
        assert (len(prefill.bodies), len(decode.bodies)) == (1, 2)
        await stage.until(lambda: stage.open == 0)


@pytest.mark.parametrize("part", [b"", b'{"kv_transfer_params":{'])
async def test_a_hand_over_that_drips_delays_no_request(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "HAND_OVER_S", 0.01)

    async def answer(asked: Asked) -> bool:
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + part)
        await asked.gone()
        return False

    prefill, decode = RawEngine(answer), Worker(answering(WHOLE))
    async with paired(prefill, decode, VLLM) as stage:
        response = await stage.ask(CHAT, LONG)
        assert (response.status, response.body) == (200, WHOLE)
        await stage.until(lambda: prefill.left == 1)


STATUSES = (
    b"200 OK", b"200", b"204 x", b"206 x", b"299 x", b"100 x", b"101 x", b"103 x", b"300 x",
    b"302 x", b"304 x", b"400 x", b"401 x", b"404 x", b"408 x", b"418 x", b"429 x", b"500 x",
    b"503 x", b"599 x", b"600 x", b"999 x", b"000 x", b"20 x", b"2000 x", b"-1 x", b"abc x",
    b"\xff\xff x", b"200 \xff\xfe", b"200 " + b"x" * 20_000, b"200 a\x01b", b"400 a\tb\x7f",
)  # fmt: skip
FIELDS = (
    b"Content-Type: application/json", b"Content-Type: text/event-stream", b"Content-Type: \xff",
    b"Content-Encoding: gzip", b"Content-Encoding: \xff", b"Connection: close",
    b"Connection: keep-alive, X-A", b"Set-Cookie: a=b", b"Location: http://127.0.0.1:1/",
    b"X-A: b\x00c", b"X-A: b\x01\x7f\tc", b"Content-Type: a\x02b",
    b"X-A: b\rX-Evil: 1", b"X-\xff: b\xfe", b"X-A", b": x", b"X A: b", b" folded",
    b"X-A: " + b"a" * 30_000, b"X-A: " + b"a" * 300_000, b"X-A: b\r\n" * 3000 + b"X-B: c",
    b"Upgrade: h2c", b"Trailer: X-T", b"Retry-After: \xb2", b"Date: never",
)  # fmt: skip
BODIES = (
    WHOLE, b"", b"{}", b"\x00" * 100, b"x" * 100_000, nested(random.Random(1), DEEP),
    b'{"usage":' + nested(random.Random(2), DEEP) + b"}",
    b'{"usage":{"prompt_tokens":1e400,"completion_tokens":' + b"9" * 6000 + b"}}",
    b'{"usage":{"prompt_tokens":-5,"completion_tokens":[1],"prompt_tokens_details":[1]}}',
    b'data: {"choices":[],"usage":{"prompt_tokens":%d}}\n\ndata: [DONE]\n\n' % 2**70,
    b'data: {"error":{"code":' + b"9" * 40 + b"}}\n\n", b"data: \xff\n\n", b": a\n\n" * 1000,
    b'data: {"error":' + nested(random.Random(3), DEEP) + b"}\n\n",
)  # fmt: skip


def framed(rng: random.Random, body: bytes) -> tuple[bytes, bytes]:
    """The lines that say where a body ends, and the body; some are nonsense."""
    size = len(body)
    chunk = b"%x\r\n%s\r\n" % (size, body) if body else b""
    chunked = b"Transfer-Encoding: chunked"
    return rng.choice(
        (
            (b"Content-Length: %d" % size, body),
            (b"Content-Length: %d" % size, body),
            (b"Content-Length: %d" % size, body + b"HTTP/1.1 200 OK\r\n\r\n"),
            (b"Content-Length: %d" % (size + 9), body),
            (b"Content-Length: %d\r\nContent-Length: 5" % size, body),
            (b"Content-Length: %d\r\n%s" % (size, chunked), chunk + b"0\r\n\r\n"),
            (b"Content-Length: -5", body),
            (b"Content-Length: " + b"9" * 40, body),
            (b"Content-Length: \xb2", body),
            (chunked, chunk + b"0\r\n\r\n"),
            (chunked, chunk + b"0\r\nX-T: 1\r\nContent-Length: 5\r\n\r\n"),
            (chunked, chunk + b"0\r\n" + b"X-T: 1\r\n" * 30_000 + b"\r\n"),
            (chunked, chunk),
            (chunked, b"1;" + b"x" * 100_000 + b"\r\na\r\n0\r\n\r\n"),
            (chunked, b"zz\r\n" + body),
            (chunked, b"f" * 17 + b"\r\n" + body),
            (b"Transfer-Encoding: gzip, \xff", body),
            (b"X-None: 1", body),
        )
    )


def answer_of(rng: random.Random) -> bytes:
    interim = (
        b"HTTP/1.1 10%d x\r\n\r\n" % rng.choice((0, 2, 3)) * rng.choice((0, 0, 0, 1, 20, 5000))
    )
    lines, body = framed(rng, rng.choice(BODIES))
    fields = rng.sample(FIELDS, rng.choice((0, 1, 1, 2)))
    version = rng.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"SSH-2"))
    head = b"\r\n".join([version + b" " + rng.choice(STATUSES), *fields, lines])
    whole_ = interim + head + b"\r\n\r\n" + body
    return mutilated(rng, whole_) if rng.random() < 0.15 else whole_


async def got(stage: Stage, http: aiohttp.ClientSession, stream: bool) -> tuple[int, bytes]:
    """Status and body; b"cut" for an answer that breaks off after it began."""
    body = {**BODY, "stream": stream}
    async with http.post(f"{stage.base}{CHAT}", json=body) as response:
        assert "X-Evil" not in response.headers
        try:
            return response.status, await response.read()
        except aiohttp.ClientPayloadError:
            return response.status, b"cut"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("alone", [False, True])
async def test_an_answer_of_any_form_is_no_fault_of_the_gateway(
    alone: bool, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    given = b""

    async def answer(asked: Asked) -> bool:
        await asked.send(given)
        return False  # an answer that hangs would be waited for

    caplog.set_level(logging.INFO)
    engine = RawEngine(answer)
    others = [] if alone else [Worker(answering(WHOLE))]
    async with (
        beside(engine, *others, dial={"retry_budget": RetryBudgetPolicy(least_per_s=1e4)}) as stage,
        aiohttp.ClientSession(max_line_size=1 << 15, max_field_size=1 << 15) as http,
    ):
        stage.served.fleet.core.fleet.outliers.reconfigure(False)
        for number in range(ANSWERS):
            given = answer_of(rng)
            about = f"answer {number} of seed {seed}: {given[:200]!r}"
            status, body = await got(stage, http, rng.random() < 0.5)
            assert b"GATEWAY_FAULT" not in body, about
            if alone:
                passed = 200 <= status < 300 or 400 <= status < 600
            else:  # 502: a good answer whose head is too long; else its own, or the other one's
                passed = 200 <= status < 300 or 400 <= status < 500 or status == 502
                passed &= status not in (408, 429) and (status != 502 or b"HEAD_TOO" in body)
            assert passed, f"{about}: {status} {body[:100]!r}"
        assert len(engine.asked) > ANSWERS // 3  # of two workers that tie, at random
        await stage.until(lambda: stage.open == 0)
        await stage.until(lambda: stage.sample("kvroute_open_requests", program="gateway") == 0)
    assert not [record for record in caplog.records if record.exc_info]
