"""`kvroute render` on a real folder, against an HTTP server that answers as an engine does."""

import json
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner, Result
from typing_extensions import override

from router.app.offline.render import render
from router.request import bodies
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from tests.stage.prompts.bodies import CHATS
from tests.stage.prompts.tiny_tokenizer import make_folder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
BODY = json.dumps(CHATS["system"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture
def ids(folder: Path) -> list[int]:
    renderer = Renderer(RendererSettings(folder=str(folder)))
    rendered = renderer.render(bodies.CHAT, BODY.encode(), "vllm")
    return array("I", rendered.token_bytes).tolist()


@pytest.fixture
def engine(ids: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Its address, and the ids that it answers with."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps({"token_ids": ids}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        @override
        def log_message(self, *_: object) -> None:
            """Nothing on the test's standard error."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", ids
        server.shutdown()
        thread.join()


def ran(folder: Path, *flags: str, body: str = BODY) -> Result:
    return CliRunner().invoke(render, ["-", "--folder", str(folder), *flags], input=body)


def test_a_body_is_shown_with_count_shape_and_text(folder: Path, ids: list[int]) -> None:
    result = ran(folder, "--show")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["tokens", str(len(ids))]
    assert lines[1].split() == ["shape", "chat+system"]
    assert "<|im_start|>user" in lines


def test_tokens_that_an_engine_has_too_end_well(
    folder: Path, engine: tuple[str, list[int]]
) -> None:
    result = ran(folder, "--against", engine[0])
    assert result.exit_code == 0
    assert f"the same {len(engine[1])} tokens" in result.output


def test_the_first_token_that_differs_is_shown(folder: Path, engine: tuple[str, list[int]]) -> None:
    engine[1][5] += 1
    result = ran(folder, "--against", engine[0])
    assert result.exit_code == 1
    assert "the first that differs is token 5" in result.output


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
def test_a_body_without_tokens_is_one_line(folder: Path, body: str, sentence: str) -> None:
    result = ran(folder, body=body)
    assert result.exit_code == 1
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1


def test_an_engine_that_is_away_is_one_line(folder: Path) -> None:
    result = ran(folder, "--against", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "gave no tokens" in result.output
