"""How each engine treats a body: a record for each engine. Pure.

A new one is its files in this folder and an entry here; events/engines/table.py has the rest of it.
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
"""A body -> what the model's chat template gets. Raises PromptError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An engine's treatment of a body."""

    templates: Mapping[Templated, ToTemplate]
    """A body of a form that is not here has tokens of the engine's only."""
    tokenizes: Mapping[Templated | None, Callable[[bytes], bytes]]
    """A body -> that of /tokenize, which gives the same tokens; raises Unsupported,
    msgspec.DecodeError. /tokenize takes no other forms."""
    has_render: bool
    """Whether it has render endpoints, which give the tokens of any body."""


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
