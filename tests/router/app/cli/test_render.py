"""`kvroute render` on a real folder, against an HTTP server that answers as an engine does."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from router.app.offline.render import render
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from tests.stage.prompts.bodies import CHATS
from tests.stage.prompts.engine import CHAT, StandIn, serving
from tests.stage.prompts.renderers import OTHER_TEMPLATE, of_template

BODY = json.dumps(CHATS["system"])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def count(own: RendererSettings) -> int:
    """Tokens of BODY."""
    return Renderer(own).render(CHAT, BODY.encode(), "vllm").count


def ran(own: RendererSettings, *flags: str, body: str = BODY) -> Result:
    return CliRunner().invoke(render, ["-", "--folder", own.folder, *flags], input=body)


def test_a_body_is_shown_with_count_shape_and_text(own: RendererSettings, count: int) -> None:
    result = ran(own, "--show")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["tokens", str(count)]
    assert lines[1].split() == ["shape", "chat+system"]
    assert "<|im_start|>user" in lines


async def test_tokens_are_compared_with_those_of_an_engine(
    own: RendererSettings, count: int, tmp_path: Path
) -> None:
    same, other = StandIn(own), StandIn(of_template(tmp_path, OTHER_TEMPLATE))
    async with serving(same), serving(other):
        result = await asyncio.to_thread(ran, own, "--against", same.address)
        assert result.exit_code == 0
        assert f"the same {count} tokens" in result.output
        result = await asyncio.to_thread(ran, own, "--against", other.address)
        assert result.exit_code == 1
        assert "the first that differs is token " in result.output


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("{", "MALFORMED_BODY"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "UNSUPPORTED_CONTENT",
        ),
    ],
)
def test_a_body_without_tokens_is_one_line(own: RendererSettings, body: str, sentence: str) -> None:
    result = ran(own, body=body)
    assert result.exit_code == 1
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1


def test_an_engine_that_is_away_is_one_line(own: RendererSettings) -> None:
    result = ran(own, "--against", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "gave no tokens" in result.output
