"""Dynamo's selection service, measured beside our router: NVIDIA Dynamo's HTTP service, and wrk.

    stand-in publishers ──ZMQ──> python -m dynamo.select_service <──HTTP── wrk, 16 connections or 1

The stage is that of bench_stream.py: as many workers, the same prompts, each whole in the cache of
one worker. The service logs errors only (by default a line for each request) and is asked for
/select, which picks and, unlike our Route, reserves nothing.
"""

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq

from indexer.hashing import block_hashes, prefix_hashes
from simulator.engines.block_pool import Stored
from simulator.engines.vllm_wire import encode_batch, encode_sequence
from tests.bench.bench_stream import ENGINES
from tests.bench.environments import DYNAMO, Missing, debian_program, python_of
from tests.bench.stream_client import BLOCK_SIZE, long_prompts, prompts
from tests.bench.timing import beside
from tests.stage.processes import cpu_s
from tests.stage.waiting import free_port

CONNECTIONS = 16
CONNECTIONS_MANY = 64
"""As many as our client has callers, where rates are compared."""
WARM_S = 1
MEASURED_S = 2
REPEATS = 3
DEADLINE_S = 30.0
MODEL = "m"
WRK_BUSY_MAX = 0.9
"""Of a core: above, wrk may be what is measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one way to ask the service gave; medians."""

    rps: float
    p50_us: float
    cpu_us: float
    """Of the service, a request"""
    service_cores: float
    wrk_cores: float


# Our row -> what stands beside it: which way to ask, and what of it.
BESIDE = {
    "cpu_tokens_unary_us": ("tokens", "cpu_us"),
    "cpu_tokens_stream_us": ("tokens", "cpu_us"),
    "cpu_hashes_unary_us": ("hashes", "cpu_us"),
    "cpu_hashes_stream_us": ("hashes", "cpu_us"),
    "cpu_tokens_key_unary_us": ("tokens", "cpu_us"),
    "cpu_tokens_key_stream_us": ("tokens", "cpu_us"),
    "cpu_hashes_key_unary_us": ("hashes", "cpu_us"),
    "cpu_hashes_key_stream_us": ("hashes", "cpu_us"),
    "route_unary_8192_p50_us": ("tokens, one at a time", "p50_us"),
    "route_unary_hashes_p50_us": ("hashes, one at a time", "p50_us"),
    "cpu_tokens_32k_unary_us": ("tokens, long", "cpu_us"),
    "cpu_tokens_32k_stream_us": ("tokens, long", "cpu_us"),
    "cpu_hashes_2048_unary_us": ("hashes, long", "cpu_us"),
    "cpu_hashes_2048_stream_us": ("hashes, long", "cpu_us"),
    "client_tokens_rps": ("tokens, most", "rps"),
    "client_hashes_rps": ("hashes, most", "rps"),
    "client_hashes_2048_rps": ("hashes, long, most", "rps"),
}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with Dynamo's number beside those that have one."""
    if not any(row["name"] in BESIDE for row in rows):
        return rows
    try:
        loads = measure()
    except Missing as error:
        return [
            row | {"note": f"no other router: {error}"} if row["name"] in BESIDE else row
            for row in rows
        ]
    found = []
    for row in rows:
        way, what = BESIDE.get(row["name"], (None, ""))
        if way is not None:
            note = "; ".join(filter(None, (row.get("note"), told(loads[way]))))
            row = beside(row, getattr(loads[way], what)) | {"note": note}
        found.append(row)
    return found


def told(load: Load) -> str:
    """What took the cores while this was measured."""
    limit = "" if load.wrk_cores < WRK_BUSY_MAX else ": wrk may be the limit"
    return f"Dynamo's service {load.service_cores:.2f} cores, wrk {load.wrk_cores:.2f}{limit}"


def measure() -> dict[str, Load]:
    """Way to ask -> what it gave. Raises Missing."""
    wrk, python = debian_program("wrk", "wrk"), python_of(*DYNAMO)
    with tempfile.TemporaryDirectory() as name, _service(python) as (port, pid):
        bodies = {
            "tokens": [_told(one) for one in prompts()],
            "hashes": [_hashed(one) for one in prompts()],
            "tokens, long": [_told(one) for one in long_prompts()],
            "hashes, long": [_hashed(one) for one in long_prompts()],
        }
        for form, those in bodies.items():
            _write(Path(name) / form, those)
        with _workers(port):
            ask = _Wrk(wrk, port, pid)
            found = {form: ask.load(Path(name) / form, CONNECTIONS) for form in bodies}
            for form in bodies:
                many = ask.load(Path(name) / form, CONNECTIONS_MANY)
                found[f"{form}, most"] = max(found[form], many, key=lambda load: load.rps)
            alone = ("tokens", "hashes")
            return found | {
                f"{form}, one at a time": ask.load(Path(name) / form, 1) for form in alone
            }


class _Wrk:
    """Drives the service, one way after the other."""

    def __init__(self, wrk: str, port: int, pid: int) -> None:
        self._wrk = wrk
        self._port = port
        self._pid = pid

    def load(self, bodies: Path, connections: int) -> Load:
        self._run(bodies, connections, WARM_S)
        found = [self._run(bodies, connections, MEASURED_S) for _ in range(REPEATS)]
        names = Load.__dataclass_fields__
        return Load(**{name: median(getattr(one, name) for one in found) for name in names})

    def _run(self, bodies: Path, connections: int, seconds: int) -> Load:
        script = Path(__file__).with_name("wrk.lua")
        command = [self._wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script)]
        command += [f"http://127.0.0.1:{self._port}", "--", str(bodies), "/select"]
        wrk_before, before = _children_cpu_s(), cpu_s(self._pid)
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        spent_s, wrk_s = cpu_s(self._pid) - before, _children_cpu_s() - wrk_before
        said = json.loads(ran.stdout.splitlines()[-1])
        if said["errors"] or not said["requests"]:
            raise AssertionError(f"Dynamo's service answered with errors: {said}")
        took_s = said["us"] / 1e6
        return Load(
            rps=said["requests"] / took_s,
            p50_us=said["p50_us"],
            cpu_us=spent_s / said["requests"] * 1e6,
            service_cores=spent_s / took_s,
            wrk_cores=wrk_s / took_s,
        )


@contextmanager
def _service(python: Path) -> Iterator[tuple[int, int]]:
    """Dynamo's service: its port and its process."""
    port = free_port()
    process = subprocess.Popen(
        [str(python), "-m", "dynamo.select_service", "--port", str(port)],
        env=os.environ | {"DYN_LOG": "error"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Missing(f"Dynamo's service did not start: code {process.returncode}")
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def _workers(port: int) -> Iterator[None]:
    """Publishers that the service listens to, and has heard: each prompt is in one's cache."""
    context = zmq.Context()
    try:
        publishers = [context.socket(zmq.XPUB) for _ in range(ENGINES)]
        for i, publisher in enumerate(publishers):
            publisher.rcvtimeo = int(DEADLINE_S * 1e3)
            about = {
                "worker_id": i,
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
                "endpoint": f"http://127.0.0.1:{8000 + i}",
                "kv_events_endpoint": "tcp://127.0.0.1:"
                f"{publisher.bind_to_random_port('tcp://127.0.0.1')}",
            }
            _ask(port, "/workers", about)
            publisher.recv()  # its subscription
        known = [*prompts(), *long_prompts()]
        first = 1
        for n, prompt in enumerate(known):
            blocks = len(prompt) // BLOCK_SIZE
            hashes = tuple(range(first, first + blocks))
            first += blocks
            stored = Stored(hashes, None, tuple(prompt.tolist()), (None,) * blocks)
            payload = encode_batch(time.time(), [stored], BLOCK_SIZE)
            publisher = publishers[n % ENGINES]
            publisher.send_multipart((b"", encode_sequence(n // ENGINES), payload))
        for n, prompt in enumerate(known):
            _until_known(port, prompt, n % ENGINES)
        yield
    finally:
        context.destroy(linger=0)


def _until_known(port: int, prompt: Any, worker: int) -> None:
    """Waits until the service picks this worker for what it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        picked = _ask(port, "/select", {"model_name": MODEL, "token_ids": prompt.tolist()})
        if picked["overlap"]["longest_matched"] == len(prompt) and picked["worker_id"] == worker:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"Dynamo's service doesn't know a prompt: {picked}")
        time.sleep(0.02)


def _told(prompt: Any) -> dict[str, Any]:
    return {"token_ids": prompt.tolist()}


def _hashed(prompt: Any) -> dict[str, Any]:
    """As the service takes ready hashes: signed, both kinds."""
    blocks = block_hashes(prompt.tobytes(), BLOCK_SIZE)
    return {
        "block_hashes": blocks.view(np.int64).tolist(),
        "sequence_hashes": prefix_hashes(blocks).view(np.int64).tolist(),
        "isl_tokens": len(prompt),
    }


def _write(path: Path, bodies: list[dict[str, Any]]) -> None:
    lines = [json.dumps({"model_name": MODEL} | body, separators=(",", ":")) for body in bodies]
    path.write_text("\n".join(lines))


def _ask(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except urllib.error.URLError:
        return False


def _children_cpu_s() -> float:
    """Of our children that have ended."""
    times = os.times()
    return times.children_user + times.children_system
