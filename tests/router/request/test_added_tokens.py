"""Tokens that only tokenizer_config.json names: the ids are those of the tokenizers package."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from router.request.prompt_error import PromptError
from router.request.refusal import Reason
from router.request.rendering import encoder as encoders
from router.request.rendering.added_tokens import with_added_tokens
from router.request.rendering.encoder import load_encoder, token_bytes
from router.request.rendering.folder import read_folder
from tests.stage.prompts.tiny_tokenizer import make_folder, make_tokenizer

FLAGS: dict[str, Any] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
KNOWN, OF_VOCABULARY = "<|im_end|>", "Ġuser"
ADDED = {
    "811": {"content": "<|vision_start|>", **FLAGS},
    "5": {"content": KNOWN, **FLAGS},
    "900": {"content": "<tool>", **FLAGS, "special": False, "normalized": True},
    "901": {"content": "<|pad|>", **FLAGS, "lstrip": True, "rstrip": True},
}
TEXTS = (
    "<|im_start|>user\nlook: <|vision_start|>x<|im_end|>",
    "a <|pad|> b<tool>c</tool> <tool>",
    "<|vision_start|><|vision_start|><|pad|>",
    "no such token < | pad | >",
)


def as_transformers() -> Tokenizer:
    """The tokenizer after what transformers does when it loads it."""
    made = Tokenizer.from_str(make_tokenizer().to_str())
    for _, about in sorted(ADDED.items(), key=lambda item: int(item[0])):
        flags = {name: about[name] for name in FLAGS}
        made.add_tokens([AddedToken(about["content"], **flags)])
    return made


@pytest.mark.parametrize("package", ["fastokens", "tokenizers"])
def test_texts_have_the_ids_that_engines_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(encoders, "_LOADERS", {package: encoders._LOADERS[package]})
    folder = make_folder(tmp_path, "{{ messages }}", added_tokens_decoder=ADDED)
    ours, theirs = load_encoder(read_folder(folder), 0), as_transformers()
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, specials=False) == token_bytes(ids)
    for about in ADDED.values():
        assert ours.id_bytes(about["content"]) == token_bytes(
            [theirs.token_to_id(about["content"])]
        )


def test_the_next_free_id_counts_and_not_the_configured_one() -> None:
    made = json.loads(with_added_tokens(make_tokenizer().to_str(), [{"content": "<new>", "id": 7}]))
    last = max(token["id"] for token in make_tokenizer_added())
    assert made["added_tokens"][-1]["id"] == last + 1


def make_tokenizer_added() -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = json.loads(make_tokenizer().to_str())["added_tokens"]
    return added


def test_what_the_tokenizer_has_stays_as_it_is() -> None:
    content = make_tokenizer().to_str()
    assert with_added_tokens(content, []) is content
    assert with_added_tokens(content, [{"content": KNOWN, "special": False}]) is content
    assert with_added_tokens(content, [{"content": 7}, {"content": ""}, {}]) is content


def test_a_token_of_the_vocabulary_keeps_its_id() -> None:
    before = make_tokenizer()
    number = before.token_to_id(OF_VOCABULARY)
    assert number is not None
    made = json.loads(with_added_tokens(before.to_str(), [{"content": OF_VOCABULARY}]))
    assert {"id": number, "content": OF_VOCABULARY}.items() <= next(
        token.items() for token in made["added_tokens"] if token["content"] == OF_VOCABULARY
    )


def test_a_unigram_vocabulary_is_a_list_of_pairs() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}
    content = json.dumps({"added_tokens": [], "model": model})
    added = [{"content": "b"}, {"content": "<s>"}]
    ids = [token["id"] for token in json.loads(with_added_tokens(content, added))["added_tokens"]]
    assert ids == [2, 3]


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"model": 1}', '{"model": {}}', '{"model": {"vocab": {"a": "x"}}}', "{"],
)
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: str) -> None:
    folder = make_folder(tmp_path, "{{ messages }}", added_tokens_decoder=ADDED)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(PromptError, match=r"tokenizer\.json"):
        load_encoder(read_folder(folder), 0)


@pytest.mark.parametrize("number", ["x", "", "1.5", "9" * 5000])
def test_an_id_that_is_no_number_is_refused_by_name(tmp_path: Path, number: str) -> None:
    folder = make_folder(tmp_path, "{{ messages }}", added_tokens_decoder=ADDED | {number: {}})
    with pytest.raises(PromptError, match="added_tokens_decoder") as raised:
        read_folder(folder)
    assert raised.value.reason is Reason.NO_TOKENIZER
