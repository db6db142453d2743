"""The programs of docs/clients.md, run as they stand there against a gateway."""

import sys
from pathlib import Path

import pytest

from router.config.settings.gateway_settings import GatewaySettings
from tests.stage.loopback import a_stage
from tests.stage.pages import python_blocks
from tests.stage.programs import ran
from tests.stage.waiting import until

INSIDE = GatewaySettings(listen="127.0.0.1:0", answer_headers=True)
PAGE = Path("docs/clients.md")


async def run(program: str, port: int) -> str:
    """Runs a page's program against a gateway; returns its output."""
    program = program.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    code, out, err = await ran(sys.executable, "-c", program)
    assert code == 0, err
    return out


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


async def test_anthropics_client_gets_a_stream_of_messages(programs: list[str]) -> None:
    pytest.importorskip("anthropic")
    async with a_stage(gateway=INSIDE) as stage:
        text, usage = (await run(programs[1], stage.router.listeners.gateway_port)).splitlines()
        assert text
        assert usage == "50 tokens, 0 prompt tokens reused"
        core = stage.router.core
        await until(lambda: not len(core.reservations), "the report")
        assert core.endings["finished"] == 1
