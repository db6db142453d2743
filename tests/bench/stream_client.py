"""The client's half of bench_stream.py, in a process of its own: asks for picks and measures.

python -m tests.bench.stream_client TARGET SERVER_PID; then a case a line on standard input, as
JSON, {"form": one of forms(), "stream": bool, "key": bool, "callers": n, "requests": n}, each
answered by {"cpu_us": server CPU a decision, "client_cpu_us": ours, "p50_us": latency, "rps":
picks a second}.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np
import uvloop

from indexer.hashing import block_hashes, hash_seed
from kvroute.client import KvRouteClient
from kvroute.v1 import Progress, ProgressState

PROMPTS = 50
PROMPT_TOKENS = 8192
LONG_PROMPTS = 12
LONG_PROMPT_TOKENS = 32_768
BLOCK_SIZE = 16
WINDOWS = 5
REPORTS_A_CALL = 500
TOKEN = "team-token"
LORA = "adapter"
LABELS = {"zone": "a"}
"""What requests of a key name, beside its tenant, which has a quota."""


def prompts() -> list[Any]:
    """The same on both sides of the benchmark: the engines hold them."""
    return _prompts(PROMPTS, PROMPT_TOKENS)


def long_prompts() -> list[Any]:
    """The same, four times as long."""
    return _prompts(LONG_PROMPTS, LONG_PROMPT_TOKENS)


def _prompts(count: int, tokens: int) -> list[Any]:
    rng = np.random.default_rng(tokens)
    return [rng.integers(0, 100_000, tokens).astype(np.uint32) for _ in range(count)]


def cpu_s(pid: int) -> float:
    """CPU time of another process, by the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime((~pid << 3) | 2)


def forms(*, key: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Keywords of route(), ready to be sent: what the client costs is in `rps`, not making them.
    key: as a caller with a key sends them."""
    asked: dict[str, Any] = {"lora_name": LORA, "required_labels": LABELS} if key else {}
    return {
        "tokens": _tokens(prompts(), asked),
        "hashes": _hashes(prompts(), asked),
        "tokens, long": _tokens(long_prompts(), asked),
        "hashes, long": _hashes(long_prompts(), asked),
    }


def _tokens(prompts: list[Any], asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"token_ids": one.tobytes()} | asked for one in prompts]


def _hashes(prompts: list[Any], asked: dict[str, Any]) -> list[dict[str, Any]]:
    seed = hash_seed(asked.get("lora_name", ""))
    return [
        {
            "block_hashes": block_hashes(one.tobytes(), BLOCK_SIZE, seed),
            "block_size": BLOCK_SIZE,
            "prompt_tokens": len(one),
        }
        | asked
        for one in prompts
    ]


async def measure(target: str, pid: int, case: dict[str, Any]) -> dict[str, float]:
    """Medians of some windows; between them reservations are ended, unmeasured."""
    options = cycle(forms(key=case["key"])[case["form"]])
    seconds: list[float] = []
    reservations: list[str] = []
    token = TOKEN if case["key"] else None
    async with KvRouteClient(
        target, batching=case["stream"], token=token, timeout_s=30.0
    ) as client:

        async def call(count: int) -> None:
            for _ in range(count):
                started = time.perf_counter()
                pick = await client.route(**next(options))
                seconds.append(time.perf_counter() - started)
                reservations.append(pick.reservation_id)

        def spent() -> tuple[float, ...]:
            return cpu_s(pid), time.process_time(), time.perf_counter()

        async def window(requests: int) -> list[float]:
            callers = case["callers"]
            began = spent()
            await asyncio.gather(*(call(requests // callers) for _ in range(callers)))
            ended = spent()
            count = len(reservations)
            while reservations:
                await client.report(*map(_finished, reservations[:REPORTS_A_CALL]))
                del reservations[:REPORTS_A_CALL]
            return [(end - begin) / count for begin, end in zip(began, ended, strict=True)]

        await window(case["requests"] // 4)  # warm: the stream opens, caches fill
        seconds.clear()
        windows = [await window(case["requests"]) for _ in range(WINDOWS)]
    server_cpu_s, client_cpu_s, wall_s = map(median, zip(*windows, strict=True))
    return {
        "cpu_us": server_cpu_s * 1e6,
        "client_cpu_us": client_cpu_s * 1e6,
        "p50_us": median(seconds) * 1e6,
        "rps": 1 / wall_s,
    }


def _finished(reservation_id: str) -> Progress:
    return Progress(reservation_id=reservation_id, state=ProgressState.PROGRESS_STATE_FINISHED)


def main(target: str, pid: int, say: Callable[[str], object]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            say(json.dumps(runner.run(measure(target, pid, json.loads(line)))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.stdout.write)
