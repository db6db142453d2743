"""The programs of docs/clients.md, run as they stand there against a gateway."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from router.config.settings.gateway_settings import GatewaySettings
from tests.stage.gateway import Worker, a_gateway, streaming
from tests.stage.loopback import a_stage
from tests.stage.pages import python_blocks
from tests.stage.waiting import until

INSIDE = GatewaySettings(listen="127.0.0.1:0", answer_headers=True)
PAGE = Path("docs/clients.md")


async def run(program: str, port: int) -> str:
    """Runs a page's program against a gateway; returns its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program.replace("127.0.0.1:8080", f"127.0.0.1:{port}")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.fixture
def programs() -> list[str]:
    programs = python_blocks(PAGE)
    assert len(programs) == 2
    return programs


async def test_openais_client_is_answered_streamed_and_refused(programs: list[str]) -> None:
    pytest.importorskip("openai")
    async with a_stage(gateway=INSIDE) as stage:
        lines = (await run(programs[0], stage.router.listeners.gateway_port)).splitlines()
        assert lines[-1].startswith("model_not_found UNKNOWN_MODEL ")
        assert lines[-2].endswith(" prompt tokens reused")
        assert any(line.split()[0] in stage.relays for line in lines if line)
        core = stage.router.core
        await until(lambda: not len(core.reservations), "the reports")
        assert core.endings["finished"] == 2


def event(**about: object) -> bytes:
    return f"event: {about['type']}\ndata: {json.dumps(about)}\n\n".encode()


MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "my-model", "content": [],
    "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": 0},
}  # fmt: skip
EVENTS = (
    event(type="message_start", message=MESSAGE),
    event(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "Light."}),
    event(type="content_block_stop", index=0),
    event(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
    event(type="message_stop"),
)


async def test_anthropics_client_gets_a_stream_of_messages(programs: list[str]) -> None:
    pytest.importorskip("anthropic")
    worker = Worker(streaming(*EVENTS))
    async with a_gateway(worker) as stage:
        program = programs[1].replace("my-model", "m")
        assert await run(program, int(stage.base.rpartition(":")[2])) == "Light.3 tokens\n"
        assert worker.requests[0].path == "/v1/messages"
        await stage.until(lambda: stage.open == 0)
