"""A picker in a process of its own, its client in a child: a line of work in, a number out."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc.aio
import uvloop
from hpack import Encoder
from prometheus_client import CollectorRegistry

from kvroute.client import KvRouteClient
from router.config.settings.picker_settings import PickerSettings
from router.gateway.picker.calls import EXT_PROC, PROCESS
from router.gateway.picker.request_stream import Blind, Reading, RequestStream
from router.gateway.picker.server import PickerServer
from router.gateway.routers import Router
from router.net.http2 import frames
from router.net.http2.frames import frame
from router.net.listener.http_bounds import HttpBounds
from router.request.tokens import ModelPrompts, Source
from tests.stage.picker import request_body, request_headers, response_body, response_headers
from tests.stage.served import Served, served

EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" token"}}]}' + (
    b" " * 138 + b"\n\n"
)
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"%s"}]}' % (b"x" * 8000)
PATH = "/v1/chat/completions"


class Fixed(RequestStream):
    """A stream whose pick is always the same."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(send, lambda: None, body_bytes_max=1 << 26)

    def when_room(self) -> None:
        self.flow()

    def ask(self, body: Reading | Blind) -> None:
        if isinstance(body, Reading):
            self.read(body.make())
        self.picked("127.0.0.1:9", {})


async def process(_: Any, context: Any) -> None:
    """The twin: grpc.aio, with messages as bytes."""
    out: list[bytes] = []
    request = Fixed(out.append)
    while (raw := await context.read()) is not grpc.aio.EOF:
        request.message(raw)
        for message in out:
            await context.write(message)
        out.clear()


async def serve(kind: str, target: str, stack: AsyncExitStack) -> int:
    """The port of a picker, or of its twin. kind: `ours`, `local` with the router in this process,
    or `grpc`."""
    if kind in ("ours", "local"):
        settings = PickerSettings(listen="127.0.0.1:0")

        def broke(error: BaseException) -> None:
            raise SystemExit(repr(error))

        registry = CollectorRegistry()
        router: Router = KvRouteClient(target)
        if kind == "local":
            router = (await stack.enter_async_context(a_router())).local()
        picker = PickerServer(
            settings, router, registry, clock=time.time, broke=broke, bounds=HttpBounds()
        )
        await picker.start()
        while not picker.ready:  # noqa: ASYNC110  # nothing to await
            await asyncio.sleep(0.01)
        KEPT.append(picker)
        return picker.port
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.stream_stream_rpc_method_handler(process)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(EXT_PROC, {"Process": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    KEPT.append(server)
    return port


@asynccontextmanager
async def a_router() -> AsyncIterator[Served]:
    """A router of two workers that makes no tokens."""
    async with served(models_prompts={"m": ModelPrompts(source=Source.OFF)}) as router:
        router.fleet.add(
            "w0", address="http://127.0.0.1:9", total_slots=10_000, total_blocks=10_000_000
        )
        router.fleet.add(
            "w1", address="http://127.0.0.1:10", total_slots=10_000, total_blocks=10_000_000
        )
        yield router


KEPT: list[Any] = []


class Client:
    """A client that knows its frames before it sends them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 1
        self._encoder = Encoder()
        self._inbox: dict[int, bytearray] = {}
        self._received = 0

    @classmethod
    async def connected(cls, port: int) -> "Client":
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        window = frames.SETTING.pack(4, 1 << 30)
        grant = frames.U32.pack(1 << 30)
        client._writer.write(frames.PREFACE + frame(frames.SETTINGS, 0, 0, window))
        client._writer.write(frame(frames.WINDOW_UPDATE, 0, 0, grant))
        return client

    def open(self) -> int:
        number, self._number = self._number, self._number + 2
        block = self._encoder.encode(
            [
                (":method", "POST"), (":scheme", "http"), (":path", PROCESS), (":authority", "a"),
                ("te", "trailers"), ("content-type", "application/grpc"),
            ]
        )  # fmt: skip
        self._writer.write(frame(frames.HEADERS, frames.END_HEADERS, number, block))
        self._inbox[number] = bytearray()
        return number

    def send(self, *messages: tuple[int, bytes]) -> None:
        self._writer.write(b"".join(framed(number, raw) for number, raw in messages))

    def end(self, number: int) -> None:
        self._writer.write(frame(frames.DATA, frames.END_STREAM, number))

    async def receive(self, count: int) -> None:
        """So many messages, of any stream."""
        while count > 0:
            head = await self._reader.readexactly(9)
            size_kind, flags, number = frames.HEAD.unpack(head)
            size, kind = size_kind >> 8, size_kind & 0xFF
            payload = await self._reader.readexactly(size)
            if kind == frames.SETTINGS and not flags & frames.ACK:
                self._writer.write(frame(frames.SETTINGS, frames.ACK, 0))
            elif kind == frames.PING and not flags & frames.ACK:
                self._writer.write(frame(frames.PING, frames.ACK, 0, payload))
            elif kind == frames.DATA:
                count -= self._messages(number, payload)

    def _messages(self, number: int, payload: bytes) -> int:
        inbox = self._inbox[number]
        inbox += payload
        count = 0
        while len(inbox) >= 5 and len(inbox) >= (size := 5 + frames.U32.unpack_from(inbox, 1)[0]):
            del inbox[:size]
            count += 1
        return count


def framed(number: int, raw: bytes) -> bytes:
    data = b"\0" + frames.U32.pack(len(raw)) + raw
    return b"".join(
        frame(frames.DATA, 0, number, data[at : at + 16_000]) for at in range(0, len(data), 16_000)
    )


FIRST = request_headers(PATH).SerializeToString()
WHOLE = request_body(BODY).SerializeToString()
ANSWER = response_headers().SerializeToString()
CHUNK = response_body(EVENT).SerializeToString()
LAST = response_body(EVENT, last=True).SerializeToString()


async def client(port: int) -> None:
    """In the child: a line of work in, `ready`, a line, then `done` or a number out."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    client = await Client.connected(port)
    while line := (await reader.readline()).split():
        what, *counts = line[0], *map(int, line[1:])
        if what == b"chunks":
            streams, chunks = counts
            numbers = [client.open() for _ in range(streams)]
            for number in numbers:
                client.send((number, FIRST), (number, WHOLE))
            await client.receive(2 * streams)
            client.send(*((number, ANSWER) for number in numbers))
            await client.receive(streams)
            say("ready")
            await reader.readline()
            for _ in range(chunks):
                client.send(*((number, CHUNK) for number in numbers))
                await client.receive(streams)
            say("done")
            for number in numbers:
                client.end(number)
        else:
            say("ready")
            await reader.readline()
            times = [await one(client) for _ in range(counts[0])]
            say(str(median(times) * 1000))


async def one(client: Client) -> float:
    number = client.open()
    client.send((number, FIRST), (number, WHOLE))
    began = time.perf_counter()
    await client.receive(2)
    took = time.perf_counter() - began
    client.send((number, ANSWER), (number, LAST))
    await client.receive(2)
    client.end(number)
    return took


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main(kind: str, target: str) -> None:
    async with AsyncExitStack() as stack:
        await work(await serve(kind, target, stack))


async def work(port: int) -> None:
    """Lines of work in, numbers out."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "client", str(port), stdin=pipe, stdout=pipe
    )
    assert child.stdin is not None
    assert child.stdout is not None
    while line := await reader.readline():
        what, *counts = line.split()
        child.stdin.write(line)
        await child.stdout.readline()
        before = time.process_time()
        child.stdin.write(b"go\n")
        answer = (await child.stdout.readline()).decode().strip()
        spent = time.process_time() - before
        if what == b"chunks":
            say(str(spent / (int(counts[0]) * int(counts[1])) * 1e6))
        elif what == b"requests":
            say(str(spent / int(counts[0]) * 1e3))
        else:
            say(answer)
    child.kill()
    await child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "client":
        uvloop.run(client(int(sys.argv[2])))
    else:
        uvloop.run(main(*sys.argv[1:]))
