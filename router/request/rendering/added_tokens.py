"""Adds tokens that only tokenizer_config.json names to the content of tokenizer.json. Pure.

transformers, and so every engine, adds them when it loads a model, in the order of their ids. A
token gets its id in the vocabulary or, if it has none there, the next free id, whatever id the
configuration gives (`Tokenizer.add_tokens` of the tokenizers package, from which the rule is).
"""

import json
from collections.abc import Sequence
from typing import Any

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def with_added_tokens(tokenizer: str, added: Sequence[dict[str, Any]]) -> str:
    """The content of tokenizer.json (`tokenizer`) with further tokens; unchanged if there are none
    to add. added: `content` and flags of each token, in order. Raises ValueError for what is no
    tokenizer."""
    if not added:
        return tokenizer
    parsed = json.loads(tokenizer)
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise ValueError("tokenizer.json has no object `model`")
    vocabulary = _vocabulary(parsed["model"])
    own = [token for token in parsed.get("added_tokens") or () if isinstance(token, dict)]
    known = {str(token.get("content", "")) for token in own}
    ids = [int(token.get("id", -1)) for token in own]
    more: list[dict[str, Any]] = []
    for token in added:
        content = token.get("content")
        if not isinstance(content, str) or not content or content in known:
            continue
        known.add(content)
        number = vocabulary.get(content)
        if number is None:
            last = max(ids, default=-1)
            number = last + 1 if last >= len(vocabulary) else len(vocabulary)
        ids.append(number)
        more.append(
            {"id": number, "content": content, **{flag: bool(token.get(flag)) for flag in _FLAGS}}
        )
    if not more:
        return tokenizer
    parsed["added_tokens"] = sorted([*own, *more], key=lambda token: int(token["id"]))
    return json.dumps(parsed, ensure_ascii=False)


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Token -> id. BPE, WordPiece and WordLevel list their vocabulary as an object, Unigram as
    pairs."""
    listed = model.get("vocab")
    if isinstance(listed, dict):
        return {str(token): int(number) for token, number in listed.items()}
    if isinstance(listed, list):
        return {str(pair[0]): number for number, pair in enumerate(listed)}
    raise ValueError("the model in tokenizer.json has no vocabulary")
