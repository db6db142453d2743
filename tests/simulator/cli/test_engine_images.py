"""The images that stand in for engines' on a cluster: their entry points, run as processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import zmq
import zmq.asyncio

from tests.stage.waiting import DEADLINE_S, free_port

IMAGE = Path(__file__).parents[2] / "cluster" / "standin"
EVENTS = '{{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:{0}"}}'
CHAT = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("command", "owner"),
    [
        (["vllm", "serve", "some/model", "--max-num-seqs=8", "--enable-sleep-mode"], "vllm"),
        (["python3", "-m", "sglang.launch_server", "--model-path=some/model"], "sglang"),
    ],
)
async def test_an_engines_command_starts_a_simulated_one(command: list[str], owner: str) -> None:
    port, events = free_port(), free_port()
    path = f"{IMAGE}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *(*command, "--host=127.0.0.1", f"--port={port}"),
        f"--kv-events-config={EVENTS.format(events)}",
        env=os.environ | {"PATH": path, "PYTHONPATH": str(IMAGE), "SIMULATE": "--speed 100"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        shown = b""
        async with asyncio.timeout(DEADLINE_S):
            while b"Ctrl-C" not in shown:
                shown += await process.stdout.readline()
        assert b"warning" not in shown
        if owner == "vllm":
            assert b"left out: --enable-sleep-mode" in shown
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.get("/v1/models") as response:
                (model,) = (await response.json())["data"]
                assert (model["id"], model["owned_by"]) == ("some/model", owner)
            with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
                subscriber.connect(f"tcp://127.0.0.1:{events}")
                subscriber.subscribe("kv-events")
                text = 0
                while not await subscriber.poll(100):  # until it is heard
                    text += 1
                    chat = CHAT | {"messages": [{"role": "user", "content": f"{text} " * 40}]}
                    async with http.post("/v1/chat/completions", json=chat) as response:
                        assert (await response.json())["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
