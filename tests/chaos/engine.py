"""A stand-in engine in a process of its own that fails on command: python -m tests.chaos.engine

Standard input takes one JSON object a line: {"fail": MODE} or {"truth": true}. Standard output
answers with one JSON object a line; the first one says that the engine listens. The process ends
when its input ends.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Collection
from contextlib import aclosing
from functools import reduce
from operator import xor
from typing import Any

import msgspec
import uvloop
import zmq.asyncio
from aiohttp import web
from typing_extensions import override

from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.http_api import AnyReply, Form, HttpApi
from simulator.live.publisher import Publisher
from tests.stage.channel import lines, say

BLOCK_SIZE = 16
MODES = ("", "hang", "errors", "half", "pages", "reuse")
"""What fails: nothing, answers that never begin, 500 to all, 500 to half, pages that are nonsense,
connections that close as they are used again. The pages are as ever but in that of nonsense."""

NONSENSE: tuple[bytes, ...] = (
    b"",
    b"\xff\xfe\x00" * 100,
    b"<html><body>502 Bad Gateway</body></html>",
    b'{"object":"list","data":[{"id":7,"max_model_len":1e30}]}',
    b'{"object":"list","data":' + b"[" * 2000,
    b"vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n",
    b"vllm:num_requests_running 1e30\nvllm:kv_cache_usage_perc 1e400\n",
    b'vllm:cache_config_info{block_size="-5",num_gpu_blocks="' + b"9" * 400 + b'"} 1\n',
    b"vllm:num_requests_running{" + b'a="' * 5000 + b"\n",
    b"x" * 200_000,
)
"""Pages in place of every page: empty, binary, another server's, numbers out of range, unended."""


class FailingApi(HttpApi):
    """The engine's HTTP api, as long as it doesn't fail."""

    def __init__(self, engine: Engine, publisher: Publisher, rng: random.Random) -> None:
        super().__init__(engine, publisher)
        self.mode = ""
        self._rng = rng
        self._healed = asyncio.Event()
        self._used: set[object] = set()
        """Addresses from which a request came on a connection that is open."""

    def fail(self, mode: str) -> None:
        """What fails from now on; requests that hang go on when nothing hangs any longer."""
        if mode not in MODES:
            raise ValueError(f"no mode {mode!r}")
        self.mode = mode
        self._healed.set()
        self._healed = asyncio.Event()

    @override
    async def _answer(self, form: Form, request: web.Request) -> web.StreamResponse:
        while self.mode == "hang":
            await self._healed.wait()
        if self.mode == "reuse" and request.transport is not None:
            client = request.transport.get_extra_info("peername")
            if client in self._used:
                self._used.discard(client)
                request.transport.close()
                return web.Response()  # nobody reads it
            self._used.add(client)
        if self.mode == "errors" or (self.mode == "half" and self._rng.random() < 0.5):
            return web.Response(status=500, text="CUDA error: an illegal memory access")
        return await super()._answer(form, request)

    @override
    async def _stream(
        self, request: web.Request, arguments: dict[str, Any], reply: AnyReply
    ) -> web.StreamResponse:
        """The first chunk as it comes, all others in one write at the end: a write is what an
        answer costs most here, and a client needs to know no more than that it began."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        rest = []
        async with aclosing(self._engine.stream(**arguments)) as chunks:
            async for chunk in chunks:
                first, last = not response.prepared, chunk.completion is not None
                told = reply.chunk(chunk.token_ids, first=first, last=last)
                if first and not last:
                    await response.prepare(request)
                    await response.write(told)
                else:
                    rest.append(told)
                if chunk.completion is not None:
                    rest.append(reply.end(chunk.completion))
        if not response.prepared:
            await response.prepare(request)
        await response.write(b"".join(rest))
        await response.write_eof()
        return response

    @override
    async def _health(self, request: web.Request) -> web.Response:
        return self._nonsense() or await super()._health(request)

    @override
    async def _page(self, request: web.Request) -> web.Response:
        return self._nonsense() or await super()._page(request)

    @override
    async def _models(self, request: web.Request) -> web.Response:
        return self._nonsense() or await super()._models(request)

    def _nonsense(self) -> web.Response | None:
        return web.Response(body=self._rng.choice(NONSENSE)) if self.mode == "pages" else None


class Truth:
    """The blocks that an engine holds, by PrefixHash, from their token ids, without a relay."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}
        """The engine's own hash of a block -> its PrefixHash."""

    def learn(self, payload: bytes) -> None:
        """The names of the blocks in a batch of events; those of removed ones are kept."""
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] != "BlockStored":
                continue
            parent = event["parent_block_hash"]
            blocks = block_hashes(pack_tokens(event["token_ids"]), event["block_size"])
            above = None if parent is None else self._names[parent]
            chain = prefix_hashes(blocks, above).tolist()
            self._names.update(zip(event["block_hashes"], chain, strict=True))

    def summary(self, held: Collection[int]) -> tuple[int, int]:
        """How many distinct blocks these are, and the xor of their PrefixHashes.

        A block of which no event was published yet counts, and has no part in the xor.
        """
        distinct = {self._names.get(name, name) for name in held}
        return len(distinct), reduce(xor, {self._names.get(name, 0) for name in held}, 0)


async def run(asked: argparse.Namespace) -> int:
    rng = random.Random(asked.seed)
    truth = Truth()
    with zmq.asyncio.Context() as context:
        publisher = Publisher(
            context,
            endpoint=f"tcp://127.0.0.1:{asked.port + 1}",
            replay_endpoint=f"tcp://127.0.0.1:{asked.port + 2}",
        )

        def publish(payload: bytes) -> None:
            truth.learn(payload)
            publisher.publish(payload)

        scheduler = SchedulerConfig(
            block_count=asked.blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=asked.slots,
            joined_steps_max=64,
            hash_seed=rng.getrandbits(32),
        )
        engine = Engine(EngineConfig(asked.name, scheduler), ScaledClock(asked.speed), publish)
        api = FailingApi(engine, publisher, rng)
        try:
            await api.start(asked.port)
            say(listens=api.address)
            async for command in lines():
                answer(command, api, engine, truth)
        finally:
            engine.stop()
            await api.stop()
            await publisher.close()
    return 0


def answer(command: dict[str, Any], api: FailingApi, engine: Engine, truth: Truth) -> None:
    if "fail" in command:
        api.fail(command["fail"])
        say(fails=command["fail"])
    if "truth" in command:
        held = {name for _, name in engine.contents()}
        blocks, digest = truth.summary(held)
        load = engine.load()
        say(blocks=blocks, digest=digest, running=load.running, waiting=load.waiting)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.engine", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True, help="of HTTP; events and replay follow")
    parser.add_argument("--blocks", type=int, default=2048, help="of 16 tokens")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--speed", type=float, default=1.0, help="engine seconds in a second")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
