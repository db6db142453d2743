"""An engine whose answers are odd: a raw server on loopback, and a seeded generator of answers."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.stage.tcp import tcp_server

END = b"\r\n\r\n"


@dataclass(frozen=True)
class Odd:
    """An answer as bytes. pause_s: between its pieces."""

    name: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    forever: bool = False
    """The last piece is repeated."""
    closes: bool = True


def whole(
    body: bytes,
    status: str = "200 OK",
    content_type: str = "application/json",
    more: bytes = b"",
    length: int | None = None,
) -> bytes:
    said = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {said}\r\n"
    return head.encode() + more + b"\r\n" + body


def odd_value(rng: random.Random, depth: int = 0) -> bytes:
    """JSON, or what looks like it."""
    kind = rng.randrange(18)
    match kind:
        case 0:
            return str(rng.choice((-1, 2**31, 2**32, 2**63, 2**64, 10**4000))).encode()
        case 1:
            return rng.choice((b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-0.0", b"1.5"))
        case 2:
            return rng.choice((b"true", b"false", b"null", b'""', b"[]", b"{}"))
        case 3:
            size = rng.choice((500, 5_000, 100_000))
            return b"[" * size + b"]" * size
        case 4:
            size = rng.choice((500, 5_000, 50_000))
            return b'{"x":' * size + b"1" + b"}" * size
        case 5:
            return (
                b'"'
                + rng.choice((b"\\ud800", b"\xff\xfe", b"\x00", b"\\u0000", b"a" * 9000))
                + b'"'
            )
        case 6:
            return b"[" + b",".join([b"1"] * rng.choice((1, 70_000, 400_000))) + b"]"
        case 7:
            return b"[" + b",".join([b"4294967295"] * rng.choice((3, 70_000))) + b"]"
        case 8:
            return b"[1,2,%d]" % rng.choice((-1, 2**32, 2**70))
        case 9:
            return b"[1,2.5,3]"
        case 10:
            return b"[[1,2],[3]]"
        case 11:
            return b'["1","2"]'
        case 12 | 13 if depth < 3:
            values = [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
            return b"[" + b",".join(values) + b"]"
        case 14 if depth < 3:
            names = rng.choices(FIELDS, k=rng.randrange(5))
            pairs = [b'"%s":%s' % (name.encode(), odd_value(rng, depth + 1)) for name in names]
            return b"{" + b",".join(pairs) + b"}"
        case 15:
            return b"[1,2,3"
        case 16:
            return b"\xef\xbb\xbf{}"
        case _:
            return b"[%d,7]" % rng.randrange(1 << 32)


STATUSES = (
    "000 X", "99 X", "204 No Content", "302 Found", "401 Unauthorized", "418 Teapot", "500 No",
    "503 No", "999 X", "-1 X", "x y",
)  # fmt: skip
FIELDS = (
    "tokens", "token_ids", "features", "mm_hashes", "mm_placeholders", "count", "max_model_len",
    "data", "id", "parent", "object", "version", "loads", "num_running_reqs", "model",
)  # fmt: skip


def odd_body(rng: random.Random) -> bytes:
    """The body of an answer to a question for tokens or a page."""
    match rng.randrange(8):
        case 0 | 1:
            return b'{"tokens":%s,"token_ids":%s}' % (odd_value(rng), odd_value(rng))
        case 2:
            place = b'{"offset":%s,"length":%s}' % (odd_value(rng, 3), odd_value(rng, 3))
            features = b'{"mm_hashes":{"image":[%s]},"mm_placeholders":{"image":[%s]}}' % (
                rng.choice((b'"a"', b"null", odd_value(rng, 3))),
                place,
            )
            return b'{"token_ids":[1,2,3,4],"features":%s}' % features
        case 3:
            return b'{"data":[{"id":%s,"parent":%s,"max_model_len":%s}]}' % (
                odd_value(rng, 3),
                odd_value(rng, 3),
                odd_value(rng, 3),
            )
        case 4:
            line = b"vllm:num_requests_running{engine=%s} %s\n"
            labels = rng.choice((b'"0"', b'"-1"', b'"99999999999"', b'"x"', b'"'))
            value = rng.choice((b"1", b"NaN", b"1e400", b"-7", b"9" * 400, b"x", b""))
            return line % (labels, value) * rng.choice((1, 20_000))
        case 5:
            return rng.randbytes(rng.choice((0, 1, 1000, 100_000)))
        case _:
            return odd_value(rng)


def odd_answer(rng: random.Random) -> Odd:
    """Any answer: odd bodies, statuses, heads, encodings, lengths and paces."""
    body = odd_body(rng)
    match rng.randrange(16):
        case 0:
            status = rng.choice(STATUSES)
            return Odd(f"status {status}", (whole(body, status, more=b"Location: http://x/\r\n"),))
        case 1:
            return Odd("gzip", (whole(body, more=b"Content-Encoding: gzip\r\n"),))
        case 2:
            return Odd("type", (whole(body, content_type=rng.choice(("text/html", "x", "a/b;c"))),))
        case 3:
            return Odd("longer", (whole(body, length=len(body) + 100),))
        case 4:
            return Odd("shorter", (whole(body, length=max(0, len(body) - 3)),))
        case 5:
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" + END
            return Odd(
                "chunks", (head, rng.choice((b"ffffffffffffffffff\r\n", b"-1\r\n", b"5\r\nab")))
            )
        case 6:
            return Odd("silent", (), closes=False)
        case 7:
            return Odd("closed", ())
        case 8:
            interim = b"HTTP/1.1 100 Continue\r\n\r\n" * 200
            return Odd("interim", (interim,), pause_s=0.001, forever=True)
        case 9:
            return Odd("head", (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,), forever=True)
        case 10:
            head = whole(b"", length=1 << 40)
            return Odd("drip", (head, b" "), pause_s=0.01, forever=True)
        case 11:
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" + END
            return Odd("flood", (head, b"10000\r\n" + b" " * 65536 + b"\r\n"), forever=True)
        case 12:
            return Odd("noise", (rng.randbytes(2000),))
        case _:
            return Odd("body", (whole(body),))


@dataclass
class OddEngine:
    """Answers each request as `next` says, by its path."""

    next: Callable[[str], Odd]
    address: str = ""
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                answer = await self._question(reader)
                await _write(writer, answer)
                if answer.closes:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the test is over, or its client left
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _question(self, reader: asyncio.StreamReader) -> Odd:
        head = await reader.readuntil(END)
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        body = await reader.readexactly(length)
        path = head.split(b" ")[1].decode()
        self.asked.append(path)
        self.bodies.append(body)
        return self.next(path)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with tcp_server(self._serve) as port:
            self.address = f"http://127.0.0.1:{port}"
            yield


async def _write(writer: asyncio.StreamWriter, answer: Odd) -> None:
    for piece in answer.pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(answer.pause_s)
    while answer.forever:
        writer.write(answer.pieces[-1])
        await writer.drain()
        await asyncio.sleep(answer.pause_s)


def plain(body: object) -> Odd:
    """An answer as it should be."""
    return Odd("plain", (whole(json.dumps(body).encode()),), closes=False)
