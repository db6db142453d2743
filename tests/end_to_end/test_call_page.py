"""The programs of docs/call-it.md and those that it links to, run as they stand there."""

import re
import sys
from pathlib import Path

import pytest

from tests.stage.loopback import Stage, a_stage
from tests.stage.pages import python_blocks, text_of
from tests.stage.programs import ran
from tests.stage.waiting import until

PAGE = Path("docs/call-it.md")
EXAMPLES = Path("docs/examples/python")


async def run(program: str, stage: Stage, *arguments: str) -> tuple[str, str]:
    """Runs a page's program against a stage; returns its output and its errors."""
    program = program.replace("127.0.0.1:50051", f"127.0.0.1:{stage.router.listeners.grpc_port}")
    program = program.replace("http://127.0.0.1:8000", stage.engines[0].address)
    program = program.replace("my-model", "stand-in")
    code, out, err = await ran(sys.executable, "-c", program, *arguments)
    assert code == 0, err
    return out, err


@pytest.fixture
def programs() -> list[str]:
    """The page's own, tokens.py, attempts.py."""
    whole, excerpt = python_blocks(PAGE)
    tokens, attempts = (text_of(EXAMPLES / name) for name in ("tokens.py", "attempts.py"))
    assert excerpt in attempts
    return [whole, tokens, attempts]


async def test_the_whole_request_streams_and_the_prediction_meets_the_report(
    programs: list[str],
) -> None:
    text = "tell me a story of a router that knew what every cache held " * 4
    async with a_stage() as stage:
        out, err = await run(programs[0], stage, text)
        assert out.strip()
        assert "tokens, source: engine, verified" in err
        assert "0 cached tokens predicted, 0 reported" in err
        await stage.idle()
        _, err = await run(programs[0], stage, text)
        told = re.search(r"(\d+) cached tokens predicted, (\d+) reported", err)
        assert told is not None
        assert int(told[1]) == int(told[2]) > 100


async def test_the_request_with_tokens_of_its_own_is_predicted_as_well(
    programs: list[str],
) -> None:
    text = "tell me a story of a router that knew what every cache held " * 4
    async with a_stage() as stage:
        await run(programs[1], stage, text)
        await stage.idle()
        out, _ = await run(programs[1], stage, text)
        told = re.search(r"(\d+) predicted, (\d+) reported", out)
        assert told is not None
        assert int(told[1]) == int(told[2]) > 100


async def test_the_request_with_attempts_is_served(programs: list[str]) -> None:
    async with a_stage() as stage:
        out, err = await run(programs[2], stage, "tell me a story")
        assert out.strip()
        assert err.strip() == "1 attempts"
        await until(lambda: stage.router.core.endings["finished"] == 1, "the end of the request")
