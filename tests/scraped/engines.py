"""Stand-in engines in a process of their own that fail by files: python -m tests.scraped.engines

The file of an engine holds a word, a MODE, and is read at each request and each batch of events.
"""

import argparse
import asyncio
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop
import zmq.asyncio
from aiohttp import web
from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.http_api import Form, HttpApi
from simulator.live.publisher import Publisher
from simulator.live.stand_ins import StandIn

MODEL = "stand-in"
MODES = ("", "errors", "cut", "other-tokens", "forgets", "mute")
"""What fails: nothing; 500 to all; answers that end in their middle; tokens that are not those of
the prompt; blocks that go without an event; no event at all."""


class FailingApi(HttpApi):
    """The engine's HTTP api, as long as it doesn't fail."""

    def __init__(self, engine: Engine, publisher: Publisher, fails: Path) -> None:
        super().__init__(engine, publisher)
        self._fails = fails

    @override
    async def _answer(self, form: Form, request: web.Request) -> web.StreamResponse:
        match self._fails.read_text():
            case "errors":
                return web.Response(status=500, text="CUDA error: an illegal memory access")
            case "cut":
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                await response.prepare(request)
                await response.write(b'{"id":"')
                if request.transport is not None:
                    request.transport.abort()
                return response
        return await super()._answer(form, request)

    @override
    async def _render(self, form: Form, request: web.Request) -> web.Response:
        return self._tokens(await super()._render(form, request))

    @override
    async def _tokenize(self, request: web.Request) -> web.Response:
        return self._tokens(await super()._tokenize(request))

    def _tokens(self, response: web.Response) -> web.Response:
        if self._fails.read_text() == "other-tokens" and isinstance(response.body, bytes):
            # A token more, in each of the three forms of answers.
            response.body = response.body.replace(b"[", b"[7, ").replace(b"[7, {", b"[{")
        return response


def published(payload: bytes, mode: str) -> bytes | None:
    """What an engine that fails publishes in the place of a batch."""
    if mode == "mute":
        return None
    if mode != "forgets":
        return payload
    batch = msgspec.msgpack.decode(payload)
    batch[1] = [event for event in batch[1] if event["type"] != "BlockRemoved"]
    return msgspec.msgpack.encode(batch)


async def an_engine(
    asked: argparse.Namespace, place: int, context: zmq.asyncio.Context, stack: AsyncExitStack
) -> dict[str, object]:
    """Runs one; the settings of its relay."""
    fails = asked.fails / f"worker-{place}"
    port = asked.port and asked.port + 3 * place
    endpoints = [
        f"tcp://127.0.0.1:{number or '*'}" for number in (port and port + 1, port and port + 2)
    ]
    publisher = Publisher(context, endpoint=endpoints[0], replay_endpoint=endpoints[1])
    stack.push_async_callback(publisher.close)
    scheduler = SchedulerConfig(
        block_count=asked.blocks,
        block_size=16,
        max_num_seqs=asked.slots,
        hash_seed=random.Random(place).getrandbits(32),
    )

    def publish(payload: bytes) -> None:
        batch = published(payload, fails.read_text())
        if batch is not None:
            publisher.publish(batch)

    config = EngineConfig(fails.name, scheduler, MODEL)
    engine = Engine(config, ScaledClock(asked.speed), publish)
    api = FailingApi(engine, publisher, fails)
    await api.start(port)
    stack.push_async_callback(api.stop)
    stack.callback(engine.stop)
    return StandIn(engine, publisher, api.address, api).relay_settings()


async def run(asked: argparse.Namespace) -> None:
    with zmq.asyncio.Context() as context:
        async with AsyncExitStack() as stack:
            engines = [await an_engine(asked, i, context, stack) for i in range(asked.count)]
            part = asked.out.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(engines))
            part.rename(asked.out)
            await asyncio.Event().wait()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scraped.engines", description=__doc__)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=2048, help="of 16 tokens")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--speed", type=float, default=1.0, help="engine seconds in a second")
    parser.add_argument("--port", type=int, default=0, help="of HTTP; events and replay follow")
    parser.add_argument("--fails", type=Path, required=True, help="folder of files with what fails")
    parser.add_argument("--out", type=Path, required=True, help="file for the relays' settings")
    uvloop.run(run(parser.parse_args(words)))


if __name__ == "__main__":
    main(sys.argv[1:])
