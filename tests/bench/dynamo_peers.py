"""kvroute beside NVIDIA Dynamo's own router, on Dynamo's own mockers.

    python -m tests.bench.dynamo_peers --traces FOLDER [--workloads agents,nothing]
        [--routers kvroute,Dynamo] [--seeds 3]

FOLDER has claude_code_agentic_dev.jsonl and mooncake_conversation_trace.jsonl. Each router gets the
same chats at the same times, before WORKERS mockers that are started anew: vLLM's scheduler, a
quarter of the profile's speed, blocks of 64 tokens and 1,536 of them; a token is a byte. Dynamo's
routers run as its frontend does by itself, with its event plane on ZMQ; kvroute stands before the
same frontend in direct mode, as docs/install.md says for a Dynamo fleet, with the event plane on
NATS. `kvroute round-robin` beside `Dynamo round-robin` is what the longer way costs, `kvroute
again` beside `kvroute` the noise.

CPU a request is told of kvroute's processes (the router, the relay, NATS) and of the frontend. A
run takes a minute and a half. Prints a table, and writes each run to build/dynamo-peers.json. Not
in `make bench`.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from kvroute.client import KvRouteClient
from router.cluster.children.nats_server import server_binary
from simulator.cli.gateway import workers_ready
from simulator.traffic.trace import TraceRequest
from simulator.traffic.trace_file import load_trace
from tests.bench.environments import BUILD, python_of, run
from tests.bench.gateways_compared import (
    Port,
    Sessions,
    cached_share,
    clients,
    first_tokens_ms,
    poisson,
    text_of,
)
from tests.bench.processes import cpu_s, rss_mib, started
from tests.stage.prompts.byte_tokenizer import make_folder
from tests.stage.waiting import free_port

NEEDED = (
    *("aiohttp", "kubernetes<33", "msgspec", "prometheus-client<1", "pyzmq", "redis", "tqdm"),
    *("transformers", "zstandard", "pydantic", "uvloop"),
)
PRODUCT = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
"""Without what it requires: one of these packages is only on another index."""
MODEL = "stand-in"
WORKERS = 8
BLOCK_SIZE = 64
BLOCKS = 1536
SPEED = 0.25
READY_S = 120.0
SETTLED_S = 3.0
SUBJECT = "namespace.dynamo.component.backend.endpoint.generate.kv-events"
RESULTS = BUILD / "dynamo-peers.json"
_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262_144,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Router(NamedTuple):
    """What stands before the mockers."""

    mode: str
    """--router-mode of Dynamo's frontend."""
    flags: tuple[str, ...] = ()
    policy: str | None = None
    """Of kvroute before the frontend; empty: its default. None: no kvroute."""


ROUTERS = {
    "kvroute": Router("direct", (), ""),
    "Dynamo": Router("kv"),
    "Dynamo, load scale 3": Router("kv", ("--router-prefill-load-scale", "3")),
    "Dynamo, affinity": Router("kv", ("--router-session-affinity-ttl-secs", "300")),
    "Dynamo round-robin": Router("round-robin"),
    "kvroute round-robin": Router("direct", (), "round-robin"),
    "kvroute again": Router("direct", (), ""),
}


class Result(NamedTuple):
    """One router's numbers for one workload, with one seed."""

    workload: str
    router: str
    seed: int
    requests: int
    ttft_ms: float
    p50_ms: float
    p99_ms: float
    end_ms: float
    """Mean time to the end of the answer."""
    cached_share: float
    spread: float
    """Requests of the busiest worker / mean."""
    cpu_ms: float
    """A request, of kvroute's processes."""
    frontend_ms: float
    """A request, of Dynamo's frontend."""
    rss_mib: float
    """Of kvroute's processes."""


# Workloads


def agents(rng: random.Random, traces: Path) -> Sessions:
    """48 sessions of eight turns of an agentic trace: an eighth of their tokens, a fifth of their
    thinking, all begun within 38 s."""
    known: dict[str, list[TraceRequest]] = {}
    for request in load_trace(traces / "claude_code_agentic_dev.jsonl").requests:
        known.setdefault(str(request.session_id), []).append(request)
    long = [
        turns[:8]
        for _, turns in sorted(known.items())
        if len(turns) >= 8 and max(turn.prompt_tokens for turn in turns[:8]) <= 320_000
    ]
    sessions = []
    for number, turns in enumerate(rng.sample(long, 48)):
        at_s = rng.uniform(0.0, 38.0)
        name = {"X-Dynamo-Session-ID": f"agent-{number}"}
        sessions.append(
            [
                _turn(_prompt(turn, 8), max(4, min(48, turn.output_tokens // 8)))
                | {"at_s": at_s, "think_s": min((turn.think_s or 0.0) / 5, 3.0), "headers": name}
                for turn in turns
            ]
        )
    return sessions


def conversation(rng: random.Random, traces: Path) -> Sessions:
    """Five minutes of Mooncake's conversations in one: a quarter of their tokens."""
    trace = load_trace(traces / "mooncake_conversation_trace.jsonl").spread()
    from_s = rng.uniform(0.0, 3000.0)
    return [
        [
            _turn(_prompt(one, 4), max(2, min(96, one.output_tokens // 8)))
            | {"at_s": one.arrival_s / 5}
        ]
        for one in trace.window(from_s, from_s + 300.0).requests
        if one.prompt_tokens <= 100_000
    ]


def system(rng: random.Random, traces: Path) -> Sessions:
    """One system prompt of 4,096 tokens, 80 to 200 of one's own, 12 a second."""
    shared = text_of(rng, 4096)
    return [
        [_turn(shared + text_of(rng, rng.randint(80, 200)), 24) | {"at_s": at_s}]
        for at_s in poisson(rng, 12.0, 60.0)
    ]


def nothing(rng: random.Random, traces: Path) -> Sessions:
    """500 to 3,000 tokens of one's own, 14 a second."""
    return [
        [_turn(text_of(rng, rng.randint(500, 3000)), 24) | {"at_s": at_s}]
        for at_s in poisson(rng, 14.0, 60.0)
    ]


WORKLOADS = {one.__name__: one for one in (agents, conversation, system, nothing)}


def _prompt(request: TraceRequest, scale: int) -> str:
    """The text of a trace's prompt, of a `scale`-th of its tokens."""
    size = request.id_tokens // scale
    pieces = [text_of(random.Random(one), size) for one in request.hash_ids.tolist()]
    return "".join(pieces)[: max(1, request.prompt_tokens // scale)]


def _turn(content: str, tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "anew": True,
        "more": {"nvext": {"extra_fields": ["worker_id"]}},
    }


# A run


async def measured(workload: str, name: str, seed: int, traces: Path) -> Result:
    sessions = WORKLOADS[workload](random.Random(f"{seed} {workload}"), traces)
    router = ROUTERS[name]
    async with AsyncExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
        model = make_folder(room / "model")
        (model / "config.json").write_text(json.dumps(_CONFIG))
        (model / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
        ours: list[int] = []
        nats = free_port()
        if router.policy is not None:
            listen = ("-a", "127.0.0.1", "-p", str(nats), "-js", "-sd", str(room / "streams"))
            log = stack.enter_context((room / "nats.log").open("wb"))
            ours.append((await started(stack, str(server_binary()), *listen, output=log)).pid)
        env = _environment(room, None if router.policy is None else nats)
        port = free_port()
        frontend = await _dynamo(stack, room, model, router, port, env)
        if router.policy is not None:
            gateway, pids = await _kvroute(stack, room, model, router.policy, nats, port)
            ours, port = [*ours, *pids], gateway
        await clients(Port(port, 0), [[_turn(text_of(random.Random(n), 99), 2)] for n in range(2)])
        await asyncio.sleep(SETTLED_S)
        before_s, frontend_s = sum(map(cpu_s, ours)), cpu_s(frontend)
        answers = (await clients(Port(port, 0), sessions))["answers"]
        spent_s, frontend_s = sum(map(cpu_s, ours)) - before_s, cpu_s(frontend) - frontend_s
        resident = sum(map(rss_mib, ours))
    workers = [answer["worker"] for answer in answers]
    busiest = max(map(workers.count, set(workers)))
    return Result(
        workload,
        name,
        seed,
        len(answers),
        *first_tokens_ms(answers),
        round(fmean(answer["end_s"] * 1e3 for answer in answers), 1),
        cached_share(answers),
        round(busiest * WORKERS / len(answers), 2),
        round(spent_s * 1e3 / len(answers), 2),
        round(frontend_s * 1e3 / len(answers), 2),
        round(resident, 1),
    )


def _environment(room: Path, nats: int | None) -> dict[str, str]:
    """Of Dynamo's processes: no service beside them, all on this machine. nats: the port of its
    event plane; None: it is on ZMQ, as by default."""
    plane = (
        {"DYN_EVENT_PLANE": "zmq"}
        if nats is None
        else {"DYN_EVENT_PLANE": "nats", "NATS_SERVER": f"nats://127.0.0.1:{nats}"}
    )
    return {
        **os.environ,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(room / "store"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_HTTP_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        **plane,
    }


async def _dynamo(
    stack: AsyncExitStack, room: Path, model: Path, router: Router, port: int, env: dict[str, str]
) -> int:
    """The mockers and the frontend; the frontend's pid, when it knows all mockers."""
    python = str(_installed())
    log = stack.enter_context((room / "dynamo.log").open("wb"))
    sizes = ("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS))
    await started(
        stack,
        *(python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL),
        *("--num-workers", str(WORKERS), *sizes, "--speedup-ratio", str(SPEED)),
        output=log,
        env=env,
    )
    process = await started(
        stack,
        *(python, "-m", "dynamo.frontend", "--router-mode", router.mode),
        *("--http-port", str(port), *router.flags),
        output=log,
        env=env,
    )
    instances = room / "store" / "v1" / "instances"
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
        while True:
            try:
                async with http.get(f"http://127.0.0.1:{port}/v1/models") as answer:
                    known = MODEL in await answer.text()
                if known and len(list(instances.glob("*generate*"))) == WORKERS:
                    return process.pid
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


async def _kvroute(
    stack: AsyncExitStack, room: Path, model: Path, policy: str, nats: int, frontend: int
) -> tuple[int, list[int]]:
    """kvroute before the frontend: the gateway's port, and the pids of its processes."""
    gateway, grpc, url = free_port(), free_port(), f"nats://127.0.0.1:{nats}"
    config = {
        "grpc": {"listen": f"127.0.0.1:{grpc}"},
        "gateway": {"listen": f"127.0.0.1:{gateway}"},
        "metrics": {"listen": ""},
        "nats": {"url": url},
        "models": [{"name": MODEL, "prompts": {"folder": str(model)}}],
        "routing": {"policy": policy} if policy else {},
    }
    (room / "kvroute.json").write_text(json.dumps(config))
    command = (sys.executable, "-m", "router.app.main")
    relay = await started(
        stack,
        *(*command, "relay", "--engine", "dynamo", "--nats", url, "--subject", SUBJECT),
        *("--model", MODEL, "--block-size", str(BLOCK_SIZE), "--total-blocks", str(BLOCKS)),
        *("--slots", "256", "--address", f"http://127.0.0.1:{frontend}"),
    )
    serve = await started(
        stack, *command, "serve", "-c", str(room / "kvroute.json"), "--log-level", "error"
    )
    async with KvRouteClient(f"127.0.0.1:{grpc}") as client:
        await workers_ready(client, WORKERS)
    return gateway, [relay.pid, serve.pid]


def _installed() -> Path:
    """The interpreter of an environment with Dynamo."""
    python = python_of("dynamo-peers", *NEEDED)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PRODUCT)
    if subprocess.run([python, "-c", "import dynamo.mocker"], check=False).returncode:
        run(*pip)
    return python


def table_of(results: list[Result]) -> Table:
    """A row for each workload and router: medians over its seeds."""
    table = Table("workload", "router", title="beside Dynamo's router", box=None)
    columns = {
        "TTFT ms": ("ttft_ms", ",.0f"),
        "p50": ("p50_ms", ",.0f"),
        "p99": ("p99_ms", ",.0f"),
        "end to end": ("end_ms", ",.0f"),
        "cached": ("cached_share", ".1%"),
        "spread": ("spread", ".2f"),
        "CPU ms": ("cpu_ms", ".1f"),
        "frontend's": ("frontend_ms", ".1f"),
        "MiB": ("rss_mib", ".0f"),
    }
    for title in columns:
        table.add_column(title, justify="right")
    runs: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        runs.setdefault((one.workload, one.router), []).append(one)
    for (workload, router), seeds in runs.items():
        cells = [
            format(median(getattr(one, name) for one in seeds), form)
            for name, form in columns.values()
        ]
        table.add_row(workload, router, *cells)
    return table


async def compared(
    workloads: list[str], routers: list[str], seeds: int, traces: Path, console: Console
) -> None:
    results: list[Result] = []
    for workload in workloads:
        for seed in range(1, seeds + 1):
            for router in routers:
                if workload != "agents" and router == "Dynamo, affinity":
                    continue  # its chats have no sessions
                results.append(await measured(workload, router, seed, traces))
                console.print(table_of(results[-1:]))
    console.print(table_of(results))
    RESULTS.write_text(json.dumps([one._asdict() for one in results], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dynamo_peers")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the two traces")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of %(default)s")
    parser.add_argument(
        "--routers", default=";".join(ROUTERS), help="some of %(default)s, with ; between them"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each router and workload")
    given = parser.parse_args()
    console = Console(width=140)
    asyncio.run(
        compared(
            given.workloads.split(","), given.routers.split(";"), given.seeds, given.traces, console
        )
    )


if __name__ == "__main__":
    main()
