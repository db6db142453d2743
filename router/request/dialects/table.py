"""Table of the engines' dialects: how each engine treats a body. Pure.

A new engine needs its files in this folder and an entry here; events/engines/table.py has its other
records.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.request.bodies import Templated
from router.request.dialects import (
    sglang,
    sglang_messages,
    sglang_responses,
    vllm,
    vllm_messages,
    vllm_responses,
)
from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.tokenize import (
    tokenize_completion,
    tokenize_sglang_chat,
    tokenize_vllm_chat,
)

ToTemplate = Callable[[dict[str, Any], ModelFacts], TemplateInput]
"""Function from a body's fields to the input of the model's chat template. Raises PromptError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one engine makes tokens of a body: by its chat template, and by its HTTP endpoints."""

    templates: Mapping[Templated, ToTemplate]
    """Functions that make the chat template's input, by kind of body. Only the engine itself makes
    tokens of a kind that is missing here."""
    tokenizes: Mapping[Templated | None, Callable[[bytes], bytes]]
    """Functions that turn a body into one for the engine's /tokenize with the same tokens, by kind
    of body (None: completions); /tokenize takes no other kinds. Each raises Unsupported,
    and what `tokenize` names for a body that can't be read."""
    has_render: bool
    """Whether the engine has render endpoints, which give the tokens of any body."""


DIALECTS = {
    "vllm": Dialect(
        templates={
            Templated.CHAT: vllm.to_template,
            Templated.MESSAGES: vllm_messages.to_template,
            Templated.RESPONSES: vllm_responses.to_template,
        },
        tokenizes={None: tokenize_completion, Templated.CHAT: tokenize_vllm_chat},
        has_render=True,
    ),
    "sglang": Dialect(
        templates={
            Templated.CHAT: sglang.to_template,
            Templated.MESSAGES: sglang_messages.to_template,
            Templated.RESPONSES: sglang_responses.to_template,
        },
        tokenizes={None: tokenize_completion, Templated.CHAT: tokenize_sglang_chat},
        has_render=False,
    ),
}
"""Dialects by the engine's name in events/engines/table.py."""
DEFAULT = "vllm"
"""The engine whose treatment is reproduced where no worker is known."""
