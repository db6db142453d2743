"""The dialects against the tokens of real engines.

golden/ has them; tests/real_engines/record_prompts.py records them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.request.dialects.table import DIALECTS
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from tests.stage.prompts.captures import TEMPLATES, cases, digest_of
from tests.stage.prompts.tiny_tokenizer import make_folder

CAPTURES = sorted((Path(__file__).resolve().parent / "golden").glob("*.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("folders")
    return {name: make_folder(room / name, text) for name, text in TEMPLATES.items()}


def test_every_engine_has_a_capture_of_every_template() -> None:
    assert {path.stem for path in CAPTURES} == {
        f"{engine}-{template}" for engine in DIALECTS for template in TEMPLATES
    }


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_body_has_the_tokens_that_the_engine_gave(path: Path, folders: dict[str, Path]) -> None:
    name, _, template = path.stem.partition("-")
    engine = name
    captured: dict[str, Any] = json.loads(path.read_text())["cases"]
    folder = folders[template]
    renderer = Renderer(RendererSettings(folder=str(folder)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    different = {}
    for kind, case, body in cases(engine):
        result = captured[f"{kind.name}/{case}"]
        try:
            data = renderer.render(kind, json.dumps(body).encode(), engine).token_bytes
        except PromptError as error:
            if "refused" not in result:
                different[case] = (str(error), result["text"])
            continue
        if result.get("digest") != digest_of(data):
            ids = memoryview(data).cast("I").tolist()
            different[case] = (tokenizer.decode(ids, skip_special_tokens=False), result.get("text"))
    assert not different
