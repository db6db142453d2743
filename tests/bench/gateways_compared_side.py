"""Processes of gateways_compared.py: stand-in engines, a plain round robin, and the clients.

usage: gateways_compared_side.py engines COUNT SLOW
                                              prints a JSON list of relay settings, one an engine;
                                              SLOW of them need twice as long for each step; serves
                                              until its input ends
       gateways_compared_side.py robin MIRROR URL ...
                                              a proxy of aiohttp's server and client that sends
                                              each request to the next engine, and a copy to MIRROR
                                              unless that is empty; prints its port
       gateways_compared_side.py clients PORT CA TOKEN
                                              reads sessions, a JSON list of lists of turns, from
                                              its input; prints what the answers came to. CA: PEM
                                              file of the port's CA, or empty for plain HTTP.
                                              TOKEN: the clients' key, or empty. A turn with `at_s`
                                              is sent that many seconds after the start, or when the
                                              answer before it is there, and `think_s` later; past
                                              `until_s` it is not sent. `more` are further fields of
                                              its body
"""

import asyncio
import itertools
import json
import logging
import ssl
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from simulator.engines.cost_model import SlowedCost
from simulator.engines.profile import load_profile
from simulator.live.engine import EngineConfig
from simulator.live.run import live_engines
from simulator.schedulers.options import SchedulerConfig, scheduler_config

MODEL = "stand-in"
BLOCK_SIZE = 16
"""What vllm-router's kv_aware has by default."""
BLOCK_COUNT = 1536
"""24,576 tokens a cache: fewer than the prompts of any mix."""
SLOTS = 8
JOINED_STEPS = 4
"""Tokens of a chunk, so that the engines' own CPU leaves room for the proxies."""
PATH = "/v1/chat/completions"
PROFILE = "llama-70b-4xh100"


def scheduler_of_engines() -> SchedulerConfig:
    """The scheduler of each stand-in, for a simulation of them, too."""
    return scheduler_config(
        "vllm",
        load_profile(PROFILE),
        block_size=BLOCK_SIZE,
        block_count=BLOCK_COUNT,
        joined_steps_max=JOINED_STEPS,
        options={"max_num_seqs": str(SLOTS)},
    )


async def engines(count: int, slow: int) -> None:
    # sglang-router begins with HTTP/2, of which the server logs a trace.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    scheduler = scheduler_of_engines()
    slowed = replace(scheduler, cost=SlowedCost(scheduler.cost, 2.0))
    configs = [
        EngineConfig(
            f"w{number}",
            replace(slowed if number < slow else scheduler, hash_seed=number + 1),
            MODEL,
        )
        for number in range(count)
    ]
    async with live_engines(configs) as running:
        print(json.dumps([one.relay_settings() for one in running]), flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)


async def robin(mirror: str, *urls: str) -> None:
    """What a plain round robin takes with aiohttp: bytes in, bytes out."""
    turn = itertools.cycle(urls)
    copies: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:

        async def copy(path: str, body: bytes, headers: dict[str, str]) -> None:
            async with session.post(mirror + path, data=body, headers=headers) as answer:
                await answer.read()

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": request.headers.get("Content-Type", "")}
            if mirror:
                copies.add(task := asyncio.create_task(copy(request.path, body, headers)))
                task.add_done_callback(copies.discard)
            url = next(turn) + request.path
            async with session.post(url, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(PATH, forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()


async def clients(
    port: int, ca_file: str, token: str, sessions: list[list[dict[str, Any]]]
) -> None:
    """A client a session: one turn after the other, each with the answers so far."""
    async with AsyncExitStack() as stack:
        tls = ssl.create_default_context(cafile=ca_file) if ca_file else True
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                f"{'https' if ca_file else 'http'}://127.0.0.1:{port}",
                connector=aiohttp.TCPConnector(limit=0, ssl=tls),
                timeout=aiohttp.ClientTimeout(total=300),
                headers={"Authorization": f"Bearer {token}"} if token else {},
            )
        )
        began_s = perf_counter()
        answers = await asyncio.gather(*(_session(http, began_s, turns) for turns in sessions))
        took_s = perf_counter() - began_s
    flat = [answer for session in answers for answer in session]
    print(json.dumps({"answers": flat, "took_s": took_s}))  # noqa: T201


async def _session(
    http: aiohttp.ClientSession, began_s: float, turns: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    answers: list[dict[str, Any]] = []
    for turn in turns:
        if turn.get("anew"):
            messages = []
        messages += turn["messages"]
        wait_s = max(turn.get("think_s", 0.0), began_s + turn.get("at_s", 0.0) - perf_counter())
        await asyncio.sleep(wait_s)
        if perf_counter() - began_s > turn.get("until_s", inf):
            break
        text, answer = await _turn(http, messages, turn)
        messages.append({"role": "assistant", "content": text})
        answers.append(answer)
    return answers


async def _turn(
    http: aiohttp.ClientSession, messages: list[dict[str, str]], turn: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": messages,
            "max_tokens": turn["max_tokens"],
            "stream": True,
            "stream_options": {"include_usage": True},
            **turn.get("more", {}),
        }
    ).encode()
    text, first_s, usage, worker = "", None, None, None
    began_s = perf_counter()
    headers = {"Content-Type": "application/json", **turn.get("headers", {})}
    async with http.post(PATH, data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or perf_counter() - began_s
            chunk = json.loads(line[6:])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            usage = chunk.get("usage") or usage
            worker = chunk.get("nvext", {}).get("worker_id", {}).get("decode_worker_id") or worker
    if first_s is None or usage is None:
        raise RuntimeError("an answer without tokens or usage")
    return text, {
        "ttft_s": first_s,
        "end_s": perf_counter() - began_s,
        "worker": worker,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        "output_tokens": usage["completion_tokens"],
    }


def main(role: str, *arguments: str) -> None:
    match role:
        case "engines":
            work = engines(int(arguments[0]), int(arguments[1]))
        case "robin":
            work = robin(*arguments)
        case _:
            work = clients(int(arguments[0]), arguments[1], arguments[2], json.load(sys.stdin))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(*sys.argv[1:])
