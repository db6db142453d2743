"""Processes around a gateway that is measured: an engine, a bare relay, and clients.

usage: gateway_side.py engine                 prints its port; serves until its input ends
       gateway_side.py clients PORT CLIENTS CHUNKS EVERY_S ROUNDS
                                              prints streams, chunks and times to the first byte
"""

import asyncio
import json
import sys
from time import perf_counter
from typing import Any

import aiohttp
import uvloop
from typing_extensions import override

EVENT = b"data: " + b"x" * 212 + b"\n\n"
"""220 bytes, about what a token's chunk has."""
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":200}}\n\ndata: [DONE]\n\n'
)
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Cache-Control: no-cache\r\n\r\n"
)
PATH = "/v1/chat/completions"


class Engine(asyncio.Protocol):
    """Answers each request with the chunks that its body asks for, each at its time."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: Any = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark:
            return
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if len(body) < int(length):
            return
        self._received = b""
        about = json.loads(body)["metadata"]
        loop = asyncio.get_running_loop()
        self._transport.write(HEAD)
        self._next(loop, about["chunks"], about["every_s"], loop.time())

    def _next(self, loop: Any, left: int, every_s: float, at_s: float) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            loop.call_at(at_s + every_s, self._next, loop, left - 1, every_s, at_s + every_s)
        else:
            self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(USAGE), USAGE))


async def engine() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "127.0.0.1", 0, backlog=1024)
    await _served(server.sockets[0].getsockname()[1])


async def clients(port: int, count: int, chunks: int, every_s: float, rounds: int) -> None:
    metadata = {"chunks": chunks, "every_s": every_s}
    messages = [{"role": "user", "content": "hello " * 100}]
    body = json.dumps(
        {"model": "m", "stream": True, "metadata": metadata, "messages": messages}
    ).encode()
    headers = {"Content-Type": "application/json"}
    first_s: list[float] = []
    done = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream() -> None:
            nonlocal done
            began_s = perf_counter()
            url = f"http://127.0.0.1:{port}{PATH}"
            async with session.post(url, data=body, headers=headers) as answer:
                size = 0
                async for chunk in answer.content.iter_any():
                    if not size:
                        first_s.append(perf_counter() - began_s)
                    size += len(chunk)
                assert size >= chunks * len(EVENT), (answer.status, size)
            done += 1

        for _ in range(rounds):
            await asyncio.gather(*(stream() for _ in range(count)))
    print(json.dumps({"streams": done, "first_s": first_s}))  # noqa: T201


async def _served(port: int) -> None:
    print(port, flush=True)  # noqa: T201
    await asyncio.to_thread(sys.stdin.read)


def main(role: str, *arguments: str) -> None:
    match role:
        case "engine":
            work = engine()
        case _:
            port, count, chunks, every_s, rounds = arguments
            work = clients(int(port), int(count), int(chunks), float(every_s), int(rounds))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(*sys.argv[1:])
