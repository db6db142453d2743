"""Plain routes beside prompts of 100,000 tokens of text: python -m tests.bench.beside_texts

A router in a process of its own, with a child that renders, and a client in this one: 100 routes of
500 tokens a second, alone and beside one text after another. Prints p50 and p99 of the routes in
both cases, and their ratio, for each of REPEATS pairs; by itself, no part of `make bench`.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

import grpc.aio
import numpy as np

from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2, router_pb2_grpc
from router.request.prompt_settings import RendererSettings
from router.request.tokens import ModelPrompts, Source
from tests.bench.bench_prompts import SYLLABLES, tokenizer_folder
from tests.stage.served import served

REPEATS = 5
SECONDS = 8.0
EVERY_S = 0.01
WORDS = 62_000
TEXTS = 150
TOKENS = list(range(500))


async def serve() -> None:
    """The router, until it is killed. Prints its port."""
    with tempfile.TemporaryDirectory() as room:
        settings = RendererSettings(folder=str(tokenizer_folder(Path(room))))
        prompts = ModelPrompts(source=Source.LOCAL, renderer=settings, processes=1)
        async with served(models_prompts={"m": prompts}, index=NativeIndex()) as stage:
            for number in range(8):
                stage.fleet.add(f"w{number}")
            sys.stdout.write(f"{stage.server.port}\n")
            sys.stdout.flush()
            while True:
                await asyncio.sleep(0.5)
                stage.fleet.turn(0.5)


class Client:
    """Routes and reports, each a call of its own."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._router = router_pb2_grpc.RouterStub(channel)
        self.texts = 0

    async def one(self, **prompt: object) -> tuple[float, int]:
        """Seconds to the answer, and tokens of the prompt."""
        began_s = time.perf_counter()
        request = router_pb2.RouteRequest(model="m", **prompt)
        answer = await self._router.Route(request, timeout=60.0)
        took_s = time.perf_counter() - began_s
        step = router_pb2.Progress(
            reservation_id=answer.reservation_id, state=router_pb2.PROGRESS_STATE_FINISHED
        )
        await self._router.Report(router_pb2.ReportRequest(progress=[step]))
        return took_s, answer.prompt.count

    async def routes(self) -> tuple[float, float]:
        """p50 and p99 in milliseconds."""
        tasks, next_s = [], time.perf_counter()
        for _ in range(round(SECONDS / EVERY_S)):
            next_s += EVERY_S
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            ids = router_pb2.TokenIds(ids=TOKENS)
            tasks.append(asyncio.create_task(self.one(token_ids=ids)))
        took_ms = [1e3 * took_s for took_s, _ in await asyncio.gather(*tasks)]
        return float(np.median(took_ms)), float(np.percentile(took_ms, 99))

    async def write_texts(self, texts: Sequence[str]) -> None:
        """One text after another."""
        for text in cycle(texts):
            await self.one(text=text)
            self.texts += 1


def text_of(rng: random.Random) -> str:
    return " ".join("".join(rng.choices(SYLLABLES, k=3)) for _ in range(WORDS))


async def measure(port: int) -> None:
    rng = random.Random(1)
    texts = [text_of(rng) for _ in range(TEXTS)]  # none is made while routes are timed
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = Client(channel)
        _, count = await client.one(text=texts[0])
        ratios = []
        for _ in range(REPEATS):
            alone = await client.routes()
            client.texts = 0
            writing = asyncio.create_task(client.write_texts(texts[1:]))
            beside = await client.routes()
            writing.cancel()
            ratios.append(beside[1] / alone[1])
            sys.stdout.write(
                f"alone p50 {alone[0]:.2f} ms, p99 {alone[1]:.2f} ms; beside"
                f" {client.texts / SECONDS:.1f} texts/s p50 {beside[0]:.2f} ms,"
                f" p99 {beside[1]:.2f} ms: {ratios[-1]:.2f} times\n"
            )
        sys.stdout.write(f"texts of {count:,} tokens; median of the ratios {median(ratios):.2f}\n")


async def main() -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.beside_texts", "serve"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        await measure(int(await server.stdout.readline()))
    finally:
        server.kill()
        await server.wait()


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1:] == ["serve"] else main())
