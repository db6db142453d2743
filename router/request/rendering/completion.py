"""The prompts of a completion's body: text, ids, or a list of either. Pure."""

from collections.abc import Iterator
from typing import Any

from router.request.prompt_error import (
    PromptError,
    malformed,
    type_name,
    unsupported,
)
from router.request.prompt_settings import PROMPTS_MAX
from router.request.refusal import Reason

TOKEN_MAX = (1 << 32) - 1

Prompt = tuple[str | list[int], bool]
"""A text and whether the tokenizer adds its specials, or ids."""


def completion_prompts(fields: dict[str, Any]) -> list[Prompt]:
    """Prompts of a completion, 1 to PROMPTS_MAX, and their add_special_tokens. Raises
    PromptError."""
    for name in ("prompt_embeds", "suffix", "truncate_prompt_tokens"):
        if fields.get(name):
            raise unsupported(f"{name} changes the prompt in the engine")
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
            raise malformed("an item of the prompt is neither text nor token ids")


def _ids(ids: list[Any]) -> list[int]:
    if not all(type(token) is int and 0 <= token <= TOKEN_MAX for token in ids):
        raise malformed(f"a token id of the prompt is no integer from 0 to {TOKEN_MAX}")
    return ids
