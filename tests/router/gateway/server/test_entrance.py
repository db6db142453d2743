"""The entrance: the order of its steps, and what a refused request costs, over real sockets.

Bytes are counted, and no memory is measured: what the unpackers gave, and what the room held.
"""

import asyncio
import gzip
import json
import logging
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.gateway.server.room import Place
from router.gateway.server.unpacking import ENCODINGS, STEP_BYTES, Unpacker, zstd_library
from router.request.bodies import PATHS
from tests.router.gateway.server.test_gateway import BODY, CHAT, WHOLE
from tests.router.gateway.server.test_unpacking import bomb, pieces
from tests.stage.gateway import GUARD_S, Stage, Worker, a_gateway, answering
from tests.stage.keys import a_door, identity

zstd = zstd_library()
CONTENT = json.dumps(BODY).encode()
KEY = b"Authorization: Bearer a-token"
MIB = 1 << 20
OWN = ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/m", "/nothing", "*")


class Counted:
    """What was unpacked, and the most that bodies held."""

    def __init__(self) -> None:
        self.unpacked = self.most = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    seen, steps, add = Counted(), Unpacker.steps, Place.add

    def counting(self: Unpacker, packed: bytes) -> Iterator[bytes]:
        for step in steps(self, packed):
            seen.unpacked += len(step)
            yield step

    def adding(self: Place, size: int) -> None:
        add(self, size)
        seen.most = max(seen.most, self.room.bytes)

    monkeypatch.setattr(Unpacker, "steps", counting)
    monkeypatch.setattr(Place, "add", adding)
    return seen


def head(path: str = CHAT, *headers: bytes, length: int | None, method: str = "POST") -> bytes:
    size = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    lines = (f"{method} {path} HTTP/1.1".encode(), b"Host: a", size, *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Call:
    """One connection of a client that writes its bytes by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, stage: Stage) -> "Call":
        return cls(*await asyncio.open_connection("127.0.0.1", stage.gateway.port))

    async def answer(self, *, bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case names, and body of the next answer. bodiless: of HEAD."""
        async with asyncio.timeout(GUARD_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:-2])
            length = 0 if bodiless else int(headers.get("content-length", "0"))
            if length:
                return int(lines[0].split()[1]), headers, await self.reader.readexactly(length)
            return int(lines[0].split()[1]), headers, b""

    async def whole(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Writes, reads the answer, and leaves."""
        try:
            self.writer.write(data)
            return await self.answer()
        finally:
            self.writer.close()


async def sent(stage: Stage, data: bytes) -> tuple[int, dict[str, str], bytes]:
    return await (await Call.to(stage)).whole(data)


async def served(stage: Stage, *headers: bytes) -> bool:
    """Whether a good client's request is."""
    status, _, body = await sent(stage, head(CHAT, *headers, length=len(CONTENT)) + CONTENT)
    return (status, body) == (200, WHOLE)


def total(stage: Stage) -> float:
    """Requests, of all paths and outcomes."""
    (family,) = stage.gateway.counters.requests.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_nothing_is_unpacked_of_a_request_that_is_not_let_in(
    tmp_path: Path, counted: Counted, encoding: str
) -> None:
    door = a_door(tmp_path, identity("a"), identity("b", limits={"requests_per_s": 0.001}))
    packed = bomb(encoding, 8 * MIB)
    rng = random.Random(encoding)
    packing = b"Content-Encoding: " + encoding.encode()
    keys = (
        None,
        b"Authorization: Bearer wrong",
        b"X-Api-Key: \xff",
        b"Authorization: Bearer b-token",
    )
    async with a_gateway(Worker(answering(WHOLE)), door=door, body_mib_max=1) as stage:
        assert await served(stage, KEY)
        assert await served(stage, b"Authorization: Bearer b-token")  # at its limit from now on
        count = 0
        for path in (*PATHS, *OWN):
            for method in ("POST", "GET", "OPTIONS", "PUT"):
                key = rng.choice(keys)
                if method == "OPTIONS" or path in OWN:
                    key = rng.choice((*keys, KEY))
                length = rng.choice((len(packed), None))
                headers = [packing, *([] if key is None else [key])]
                rng.shuffle(headers)
                body = packed if length is not None else chunk(packed) + chunk(b"")
                data = head(path, *headers, length=length, method=method) + body
                status, _, _ = await sent(stage, data)
                usual = (200, 204, 401, 403, 404, 405, 429, 503)
                assert status in usual or (status, path) == (400, "*"), (method, path, key)
                count += 1
        assert counted.unpacked == 0
        assert total(stage) == count + 2
        assert await served(stage, KEY)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("parts", [1, 7, 300])
async def test_a_bomb_of_a_client_is_unpacked_as_far_as_its_bound(
    counted: Counted, encoding: str, parts: int
) -> None:
    packed = bomb(encoding, 64 * MIB)
    rng = random.Random(parts)
    cuts = pieces(packed, [rng.randrange(1 << 20) for _ in range(parts - 1)])
    packing = b"Content-Encoding: " + encoding.encode()
    async with a_gateway(Worker(answering(WHOLE)), body_mib_max=2) as stage:
        data = head(CHAT, packing, length=None) + b"".join(map(chunk, cuts)) + chunk(b"")
        calls = [asyncio.create_task(sent(stage, data)) for _ in range(12)]
        assert await served(stage)
        for status, headers, body in await asyncio.gather(*calls):
            assert (status, headers["x-kvroute-reason"]) == (413, "body_too_large")
            assert b"over 2 MiB" in body
        assert counted.unpacked <= 12 * (2 * MIB + STEP_BYTES)
        assert counted.most <= 12 * (MIB + STEP_BYTES) + 2 * MIB, "one at a time past the first MiB"
        assert stage.gateway.server._entrance.room.bytes == 0


@pytest.mark.parametrize("ratio", [1, 10, 1000])
@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_packed_body_reaches_the_worker_unpacked(encoding: str, ratio: int) -> None:
    words = random.Random(ratio).randbytes(200_000 // ratio).hex().encode()
    content = json.dumps(BODY).encode()[:-1] + b', "user": "' + words * ratio + b'"}'
    pack = {"gzip": gzip.compress, "zstd": zstd.compress}.get(encoding)
    packed = pack(content) if pack is not None else zlib.compress(content)
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        packing = b"Content-Encoding: " + encoding.encode()
        status, _, _ = await sent(stage, head(CHAT, packing, length=len(packed)) + packed)
        assert status == 200
        assert worker.bodies == [content]
        assert "Content-Encoding" not in worker.requests[0].headers


async def test_what_can_not_be_unpacked_is_an_error_of_the_api_that_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = gzip.compress(CONTENT)
    cases = [
        (b"gzip", b"\x1f\x8bnonsense"),
        (b"gzip", whole[:-3]),
        (b"gzip", whole + b"more"),
        (b"zstd", b"\x28\xb5\x2f\xfd"),
        (b"zstd", CONTENT),
        (b"deflate", whole),
    ]
    async with a_gateway(Worker(answering(WHOLE))) as stage:
        for encoding, body in cases:
            data = head(CHAT, b"Content-Encoding: " + encoding, length=len(body)) + body
            status, headers, text = await sent(stage, data)
            assert (status, headers["connection"]) == (400, "close"), (encoding, body)
            assert json.loads(text)["error"]["code"] == "INVALID_BODY"
        for encoding in (
            b"br",
            b"gzip, gzip",
            b"\xff",
            b"x" * 5000,
            b"gzip\r\nContent-Encoding: br",
        ):
            data = head(CHAT, b"Content-Encoding: " + encoding, length=len(whole)) + whole
            status, headers, text = await sent(stage, data)
            assert (status, headers["accept-encoding"]) == (415, "zstd, gzip, deflate")
            assert json.loads(text)["error"]["code"] == "UNSUPPORTED_ENCODING"
        assert await served(stage)
        assert total(stage) == len(cases) + 6
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("size", [10, 20_000, 100_000, 300_000])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("bad", [b"no size\r\n", b"-1\r\n", b"f" * 17 + b"\r\n"])
async def test_a_body_that_is_no_http_ends_at_once(size: int, cut: int, bad: bytes) -> None:
    """cut: bytes of the good chunk that come with the bad one."""
    good = chunk(b"x" * size)
    first, second = good[: len(good) - cut], good[len(good) - cut :] + bad
    async with a_gateway(Worker(answering(WHOLE))) as stage:
        call = await Call.to(stage)
        call.writer.write(head(CHAT, length=None) + first)
        room = stage.gateway.server._entrance.room
        await stage.until(lambda: room.bytes == size - max(0, cut - 2))
        call.writer.write(second)
        status, headers, body = await call.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert b"INVALID_BODY" in body
        call.writer.close()
        assert (room.open, room.bytes) == (0, 0)
        data = head(CHAT, length=None) + good + bad
        assert (await sent(stage, data))[0] == 400


NAMES = (
    b"Authorization", b"X-Api-Key", b"X-Request-Id", b"traceparent", b"Expect", b"Host", b"Origin",
    b"X-Session-Id", b"X-Tenant-Id", b"X-Priority", b"X-Claude-Code-Session-Id", b"session_id",
    b"X-Gateway-Inference-Fairness-Id", b"Content-Type", b"Content-Encoding", b"Accept", b"Cookie",
    b"Access-Control-Request-Headers", b"Access-Control-Request-Method", b"Connection", b"Upgrade",
    b"X-Odd", b"Transfer-Encoding", b"Content-Length", b"TE", b"Forwarded", b"Range",
)  # fmt: skip


def odd_value(rng: random.Random) -> bytes:
    """Bytes that a header's value may have, few of which make sense."""
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(rng.choice(range(0x80, 0x100)) for _ in range(rng.randint(1, 20)))
    if kind == 1:
        return b"Bearer " + bytes([rng.choice(range(0x80, 0x100))]) + b"a-token"
    if kind == 2:
        return rng.choice((b"", b" ", b",", b"%ff", b"a" * 4000, "\u20ac".encode(), b"-1", b"1e9"))
    if kind == 3:
        return rng.choice((b"Bearer a-token", b"100-continue", b"gzip", b"chunked", b"close"))
    return bytes(rng.choice((9, *range(0x20, 0x7F))) for _ in range(rng.randint(0, 40)))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_odd_bytes_in_any_header_are_no_fault_of_the_gateway(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
    keyed: bool,
) -> None:
    monkeypatch.setattr("router.gateway.server.pace.GRACE_S", 0.02)  # announced, and not sent
    rng = random.Random(seed)
    door = a_door(tmp_path, identity("a")) if keyed else None
    good = (KEY,) if keyed else ()
    async with a_gateway(Worker(answering(WHOLE)), door=door) as stage:
        for count in range(100):
            path = rng.choice((*PATHS, *OWN, "/v1/models/\u20ac", "/%ff", "/" * 3000, "//a"))
            method = rng.choice(("POST", "POST", "GET", "OPTIONS", "HEAD", "DELETE", "CONNECT"))
            lines = [name + b": " + odd_value(rng) for name in rng.sample(NAMES, 3)]
            target = path.encode() + rng.choice((b"", b"?a=\xff", b"?%ff", b"?a=b#c"))
            data = b"%s %s HTTP/1.1\r\nConnection: close\r\nHost: a\r\n" % (method.encode(), target)
            data += b"\r\n".join(lines) + b"\r\n\r\n"
            call = await Call.to(stage)
            call.writer.write(data)
            status, _, _ = await call.answer(bodiless=method == "HEAD")
            while status == 100:
                status, _, _ = await call.answer()
            call.writer.close()
            assert status < 500 or (status, path) == (503, "/ready"), (seed, count, data, status)
        assert await served(stage, *good)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_length_and_key_are_looked_at_before_100_continue(tmp_path: Path) -> None:
    expects = b"Expect: 100-Continue"
    door = a_door(tmp_path, identity("a"))
    async with a_gateway(Worker(answering(WHOLE)), door=door, body_mib_max=1) as stage:
        for path in PATHS:
            data = head(path, expects, length=9)
            status, headers, _ = await sent(stage, data)
            assert (status, headers["connection"]) == (401, "close")
        assert (await sent(stage, head(CHAT, expects, KEY, length=2 * MIB)))[0] == 413
        packing = b"Content-Encoding: br"
        assert (await sent(stage, head(CHAT, expects, KEY, packing, length=9)))[0] == 415
        for value in (b"\xff", b"200-ok", b"", b"100-continue, more"):
            status, _, body = await sent(stage, head(CHAT, KEY, b"Expect: " + value, length=9))
            assert (status, json.loads(body)["error"]["code"]) == (417, "EXPECTATION_FAILED")
        call = await Call.to(stage)
        call.writer.write(head(CHAT, expects, KEY, length=len(CONTENT)))
        assert (await call.answer())[0] == 100
        status, _, body = await call.whole(CONTENT)
        assert (status, body) == (200, WHOLE)


async def test_announced_bytes_hold_no_room_and_a_key_at_its_share_stops_nobody_else(
    tmp_path: Path,
) -> None:
    door = a_door(tmp_path, identity("a"), identity("b"))
    own = (KEY, b"Authorization: Bearer b-token")
    async with a_gateway(
        Worker(answering(WHOLE)), door=door, open_max=8, body_mib_max=1, bodies_mib_max=4
    ) as stage:
        room = stage.gateway.server._entrance.room
        calls = [await Call.to(stage) for _ in range(4)]
        for call in calls:
            call.writer.write(head(CHAT, own[0], length=MIB) + b"{")
        await stage.until(lambda: room.bytes == 4)
        status, headers, body = await sent(stage, head(CHAT, own[0], length=2) + b"{}")
        assert (status, headers["x-kvroute-reason"]) == (429, "too_many_requests")
        assert b"this key has 4 open requests" in body
        assert await served(stage, own[1])
        for call in calls[:2]:
            call.writer.write(b" " * (MIB - 10))
        await stage.until(lambda: room.bytes > 2 * MIB - 20)
        calls[2].writer.write(b" " * 1000)
        status, headers, body = await calls[2].answer()
        assert (status, headers["connection"]) == (429, "close")
        assert b"bodies of requests of this key hold 2 MiB, the limit" in body
        assert await served(stage, own[1])
        for call in calls:
            call.writer.close()
        await stage.until(lambda: room.open == 0)
        assert room.bytes == 0
        assert await served(stage, own[0])


async def test_a_refusal_is_a_line_of_log_for_each_reason_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvroute.gateway")
    door = a_door(tmp_path, identity("a"))
    async with a_gateway(Worker(answering(WHOLE)), door=door, body_mib_max=1) as stage:
        for _ in range(20):
            assert (await sent(stage, head(CHAT, length=0)))[0] == 401
            assert (await sent(stage, head(CHAT, KEY, length=2 * MIB)))[0] == 413
    lines = [record.getMessage() for record in caplog.records if "is refused" in record.msg]
    assert lines == [
        "a request of 127.0.0.1 is refused: UNAUTHENTICATED: 'the call has no valid key'",
        "a request of a is refused: BODY_TOO_LARGE: 'the body is over 1 MiB'",
    ]


@pytest.mark.parametrize("seed", range(6))
async def test_drips_in_any_order_are_counted_as_they_come(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    door = a_door(tmp_path, identity("a"), identity("b"))
    async with a_gateway(Worker(answering(WHOLE)), door=door, open_max=40) as stage:
        room = stage.gateway.server._entrance.room
        calls: list[tuple[Call, int | None, bytearray]] = []
        for _ in range(20):
            call, length = await Call.to(stage), rng.choice((None, len(CONTENT)))
            call.writer.write(head(CHAT, KEY, length=length))
            calls.append((call, length, bytearray()))
        while waiting := [each for each in calls if len(each[2]) < len(CONTENT)]:
            call, length, came = rng.choice(waiting)
            part = CONTENT[len(came) : len(came) + rng.randint(1, 30)]
            came += part
            call.writer.write(part if length is not None else chunk(part))
            if rng.random() < 0.1:
                held = sum(len(c) for _, _, c in calls if len(c) < len(CONTENT))
                done = sum(len(c) for _, ln, c in calls if ln is None and len(c) == len(CONTENT))
                await stage.until(lambda held=held, done=done: room.bytes == held + done)  # type: ignore[misc]
                assert await served(stage, b"Authorization: Bearer b-token")
        for call, length, _ in calls:
            if length is None:
                call.writer.write(chunk(b""))
            status, _, body = await call.answer()
            assert (status, body) == (200, WHOLE)
            call.writer.close()
        await stage.until(lambda: room.open == 0)
        assert room.bytes == 0


async def test_a_key_owes_bytes_that_it_did_not_announce_and_those_of_refused_bodies(
    tmp_path: Path,
) -> None:
    now_s = [0.0]
    door = a_door(tmp_path, identity("a", limits={"mib_per_s": 1}), clock=lambda: now_s[0])
    content = CONTENT[:-1] + b', "user": "' + b"x" * MIB + b'"}'
    packed = gzip.compress(content)
    long = b"x" * (3 * MIB)
    cut = gzip.compress(long)[:-9]
    unannounced, gzipped = head(CHAT, KEY, length=None), b"Content-Encoding: gzip"
    cases = (
        (200, unannounced + chunk(content) + chunk(b"")),
        (200, head(CHAT, KEY, gzipped, length=len(packed)) + packed),
        (400, unannounced + chunk(long) + b"zz\r\n"),
        (413, unannounced + chunk(long) + chunk(long) + chunk(b"")),
        (400, head(CHAT, KEY, gzipped, length=len(cut)) + cut),
        (413, head(CHAT, KEY, gzipped, length=None) + chunk(bomb("gzip", 9 * MIB))),
    )
    async with a_gateway(Worker(answering(WHOLE)), door=door, body_mib_max=4) as stage:
        for expected, data in cases:
            assert (await sent(stage, data))[0] == expected
            status, _, body = await sent(stage, head(CHAT, KEY, length=2) + b"{}")
            assert (status, b"mib_per_s" in body) == (429, True)
            now_s[0] += 60


@pytest.mark.parametrize("bound", ["_open_max", "_bytes_max"])
async def test_a_request_that_finds_no_room_uses_nothing_of_its_keys_limits(
    bound: str, tmp_path: Path
) -> None:
    limits = {"requests_per_s": 1, "mib_per_s": 1, "reservations": 1}
    door = a_door(tmp_path, identity("a", limits=limits), clock=lambda: 0.0)
    async with a_gateway(Worker(answering(WHOLE)), door=door) as stage:
        room = stage.gateway.server._entrance.room
        most = getattr(room, bound)
        setattr(room, bound, 0)
        status, _, body = await sent(stage, head(CHAT, KEY, length=3 * MIB))
        assert (status, b"TOO_MANY_" in body) == (429, True)
        await stage.until(lambda: room.open == 0)
        setattr(room, bound, most)
        assert await served(stage, KEY)


async def test_a_refused_requests_rest_is_dropped_and_a_long_one_ends_its_connection(
    tmp_path: Path,
) -> None:
    async with a_gateway(Worker(answering(WHOLE)), door=a_door(tmp_path, identity("a"))) as stage:
        call = await Call.to(stage)
        call.writer.write(head(CHAT, length=1000))
        status, headers, _ = await call.answer()
        assert (status, "connection" in headers) == (401, False)
        call.writer.write(b"x" * 1000 + head(CHAT, KEY, length=len(CONTENT)) + CONTENT)
        assert (await call.answer())[0] == 200
        call.writer.close()
        for length in (1 << 20, None):
            call = await Call.to(stage)
            call.writer.write(head(CHAT, length=length))
            status, headers, _ = await call.answer()
            assert (status, headers["connection"]) == (401, "close")
            call.writer.close()


async def test_every_request_is_counted_once() -> None:
    worker = Worker(answering(WHOLE))
    requests: list[tuple[bytes, int, str, str]] = [
        (head(CHAT, length=len(CONTENT)) + CONTENT, 200, CHAT, "finished"),
        (head(CHAT, length=1) + b"{", 400, CHAT, "refused"),
        (head("/v1/models", length=0, method="GET"), 200, "/v1/models", "finished"),
        (head("/v1/models/none", length=0, method="GET"), 404, "/v1/models/NAME", "refused"),
        (head("/health", length=0, method="GET"), 200, "/health", "finished"),
        (head("/health", length=0, method="HEAD"), 200, "/health", "finished"),
        (head(CHAT, length=0, method="OPTIONS"), 204, CHAT, "finished"),
        (head(CHAT, length=0, method="GET"), 405, CHAT, "refused"),
        (head("/nothing", length=0), 404, "other", "refused"),
        (head("*", length=0, method="OPTIONS"), 204, "other", "finished"),
        (b"no HTTP\r\n\r\n", 400, "other", "refused"),
        (head(CHAT, b"X-Long: " + b"a" * 20_000, length=0), 431, "other", "refused"),
        (b"POST /v1/chat/completions HTTP/1.1\r\n\r\n", 400, "other", "refused"),
    ]
    async with a_gateway(worker) as stage:
        for number, (data, expected, path, outcome) in enumerate(requests, 1):
            labels = {"path": path, "outcome": outcome}
            before = stage.sample("kvroute_gateway_requests_total", **labels)
            call = await Call.to(stage)
            call.writer.write(data)
            status, headers, body = await call.answer(bodiless=data.startswith(b"HEAD"))
            assert status == expected, data
            if status >= 400:
                assert json.loads(body)["error"]["code"]
                assert headers["x-request-id"]
            await stage.until(lambda number=number: total(stage) == number)  # type: ignore[misc]
            assert stage.sample("kvroute_gateway_requests_total", **labels) == before + 1
            call.writer.close()


async def test_another_method_is_answered_with_those_of_the_path() -> None:
    async with a_gateway() as stage:
        for path in PATHS:
            status, headers, body = await sent(stage, head(path, length=0, method="GET"))
            assert (status, headers["allow"]) == (405, "post, options")
            assert f"{path} takes POST, OPTIONS alone" in json.loads(body)["error"]["message"]
        status, headers, _ = await sent(stage, head("/v1/models", length=0))
        assert (status, headers["allow"]) == (405, "get, head, options")


@pytest.mark.parametrize("query", [b"a=%2F%20b&c=+", b"", b"%zz&&=?/:@", b"a=%C3%A9"])
async def test_a_query_goes_on_byte_for_byte(query: bytes) -> None:
    targets: list[bytes] = []

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        targets.append(request.raw_path.encode())
        return web.Response(body=WHOLE)

    async with a_gateway(Worker(play)) as stage:
        line = b"POST %s?%s HTTP/1.1\r\nHost: a\r\n" % (CHAT.encode(), query)
        data = line + b"Content-Length: %d\r\n\r\n" % len(CONTENT) + CONTENT
        assert (await sent(stage, data))[0] == 200
    assert targets == [CHAT.encode() + (b"?" + query if query else b"")]


async def test_pages_of_other_origins_read_answers_and_errors(tmp_path: Path) -> None:
    engines = {"Access_Control_Allow_Origin".replace("_", "-"): "https://engine.example"}
    worker = Worker(answering(WHOLE, **engines))
    origin = b"Origin: https://chat.example"
    about: dict[str, Any] = {"door": a_door(tmp_path, identity("a"))}
    async with a_gateway(worker, **about) as stage:
        asks = (
            origin,
            b"Access-Control-Request-Method: POST",
            b"Access-Control-Request-Headers: authorization, content-type",
        )
        for path in (*PATHS, "/v1/models", "/nothing"):
            status, headers, _ = await sent(stage, head(path, *asks, length=0, method="OPTIONS"))
            assert (status, headers["access-control-allow-origin"]) == (204, "*")
            assert headers["access-control-allow-headers"] == "authorization, content-type"
        for key, expected in ((KEY, 200), (b"X: y", 401)):
            data = head(CHAT, origin, key, length=len(CONTENT)) + CONTENT
            status, headers, _ = await sent(stage, data)
            assert (status, headers["access-control-allow-origin"]) == (expected, "*")
            assert headers["access-control-expose-headers"] == "*"
    async with a_gateway(worker, cors_origins=("https://chat.example",)) as stage:
        for value, allowed in ((origin, "https://chat.example"), (b"Origin: https://x", None)):
            data = head(CHAT, value, length=len(CONTENT)) + CONTENT
            status, headers, _ = await sent(stage, data)
            assert (status, headers["vary"]) == (200, "origin")
            assert headers.get("access-control-allow-origin") == allowed
    async with a_gateway(worker, cors_origins=()) as stage:
        data = head(CHAT, origin, length=len(CONTENT)) + CONTENT
        assert "access-control-allow-origin" not in (await sent(stage, data))[1]
