"""Decodes a request's body, and reads a completion's prompts: texts or token ids, one or a list.
Pure.

Law: bytes that are no readable body raise PromptError with a sentence, and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from router.request.bodies import BodyFormat
from router.request.prompt_error import PromptError, malformed, type_name, unsupported
from router.request.prompt_settings import PROMPTS_MAX
from router.request.refusal import Reason

_DECODER = msgspec.json.Decoder()
TOKEN_MAX = (1 << 32) - 1

Prompt = tuple[str | list[int], bool]
"""A prompt's text or token ids, and whether the tokenizer adds its special tokens to a text."""


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded body. Its values are as the client sent them; nothing in it is checked yet."""

    kind: BodyFormat
    fields: dict[str, Any]


def read_body(kind: BodyFormat, data: bytes) -> Body:
    """Decodes a body; plain text becomes the prompt in a body of its format. Raises PromptError."""
    if kind.text_of is not None:
        return Body(kind.text_of, {"prompt": _text_of(data)})
    fields = _json_of(data)
    if not isinstance(fields, dict):
        raise malformed(f"the body is {type_name(fields)}, not an object")
    return Body(kind, fields)


def _text_of(data: bytes) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"the text is not UTF-8: {error.reason} at byte {error.start}") from error


def _json_of(data: bytes) -> Any:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise malformed(f"the body is not JSON that can be read: {error}") from error
    except UnicodeDecodeError as error:
        raise malformed(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise malformed("the body's arrays and objects are nested too deep") from error


def completion_prompts(fields: dict[str, Any]) -> list[Prompt]:
    """Prompts of a completion, 1 to PROMPTS_MAX, each with the body's add_special_tokens. Raises
    PromptError."""
    for name in ("prompt_embeds", "suffix", "truncate_prompt_tokens"):
        if fields.get(name):
            raise unsupported(f"{name} changes the prompt in a way that only an engine knows")
    specials = fields.get("add_special_tokens", True)
    if not isinstance(specials, bool):
        raise malformed(f"add_special_tokens is {type_name(specials)}, not a boolean")
    prompts = [(prompt, specials) for prompt in _prompts(fields.get("prompt"))]
    if not prompts:
        raise malformed("the prompt is an empty array")
    if len(prompts) > PROMPTS_MAX:
        raise PromptError(
            Reason.PROMPT_TOO_LONG,
            f"the body has {len(prompts)} prompts; {PROMPTS_MAX} are allowed",
        )
    return prompts


def _prompts(prompt: Any) -> Iterator[str | list[int]]:
    if isinstance(prompt, str):
        yield prompt
        return
    if not isinstance(prompt, list):
        raise malformed(f"the prompt is {type_name(prompt)}, not a string or an array")
    if prompt and isinstance(prompt[0], int):
        yield _ids(prompt)
        return
    for entry in prompt:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, list) and entry:
            yield _ids(entry)
        else:
            raise malformed("an item of the prompt is neither a string nor an array of token ids")


def _ids(ids: list[Any]) -> list[int]:
    if not all(type(token) is int and 0 <= token <= TOKEN_MAX for token in ids):
        raise malformed(f"a token id of the prompt is no integer from 0 to {TOKEN_MAX}")
    return ids
