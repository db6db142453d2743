"""A renderer from folder to tokens, on the generated tokenizer."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from router.request import bodies
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.refusal import Reason
from router.request.rendering.renderer import Renderer
from tests.stage.prompts.tiny_tokenizer import make_folder

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is the weather? éß😀"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def ids(token_bytes: bytes) -> list[int]:
    return array("I", token_bytes).tolist()


def rendered(folder: Path, kind: bodies.BodyFormat, body: Any, **more: Any) -> list[int]:
    renderer = Renderer(RendererSettings(folder=str(folder), **more))
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return ids(renderer.render(kind, data, "vllm").token_bytes)


def test_chat_has_the_tokens_of_its_rendered_text(folder: Path) -> None:
    text = "<|im_start|>user\nWhat is the weather? éß😀<|im_end|>\n<|im_start|>assistant\n"
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert rendered(folder, bodies.CHAT, CHAT) == expected


def test_text_and_a_completion_of_it_have_the_same_tokens(folder: Path) -> None:
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the weather").ids
    assert rendered(folder, bodies.TEXT, "the weather") == expected
    assert rendered(folder, bodies.COMPLETION, {"prompt": "the weather"}) == expected
    assert rendered(folder, bodies.COMPLETION, {"prompt": expected}) == expected


def test_a_list_of_prompts_routes_by_the_first_and_counts_all(folder: Path) -> None:
    renderer = Renderer(RendererSettings(folder=str(folder)))
    body = json.dumps({"prompt": [[1, 2, 3], [4, 5]]}).encode()
    result = renderer.render(bodies.COMPLETION, body, "sglang")
    assert (ids(result.token_bytes), result.count, result.usage_tokens) == ([1, 2, 3], 3, 5)


def test_settings_cross_to_a_child(folder: Path) -> None:
    settings = RendererSettings(folder=str(folder), chat_template_kwargs={"a": 1})
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=RendererSettings)
    assert crossed == settings


def test_a_missing_folder_and_a_missing_template_say_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"holds no tokenizer\.json") as raised:
        Renderer(RendererSettings(folder=str(tmp_path)))
    assert raised.value.reason is Reason.NO_TOKENIZER
    bare = make_folder(tmp_path, None)
    with pytest.raises(PromptError, match="has no chat template") as raised:
        rendered(bare, bodies.CHAT, CHAT)
    assert raised.value.reason is Reason.NO_TOKENIZER
    assert raised.value.shape == "chat"


def test_a_prompt_over_the_bound_is_refused(folder: Path) -> None:
    body = {"prompt": [1] * 11}
    assert len(rendered(folder, bodies.COMPLETION, body, tokens_max=11)) == 11
    with pytest.raises(PromptError) as raised:
        rendered(folder, bodies.COMPLETION, body, tokens_max=10)
    assert raised.value.reason is Reason.PROMPT_TOO_LONG


def test_another_template_has_another_digest(folder: Path, tmp_path: Path) -> None:
    other = make_folder(tmp_path, TEMPLATE + " ")
    same = make_folder(tmp_path / "same", TEMPLATE)
    digests = [Renderer(RendererSettings(folder=str(one))).digest for one in (folder, same, other)]
    assert digests[0] == digests[1] != digests[2]
