"""How each engine treats a body: a record for each engine. Pure.

A new one is its files in this folder and an entry here; events/engines/table.py has the rest of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.request.dialects import (
    sglang,
    sglang_messages,
    sglang_tokenize,
    vllm,
    vllm_messages,
    vllm_tokenize,
)
from router.request.dialects.dialect import ModelFacts, TemplateInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An engine's treatment of a body."""

    to_template: Callable[[dict[str, Any], ModelFacts], TemplateInput]
    """A chat's body -> what its chat template gets."""
    to_chat: Callable[[dict[str, Any], ModelFacts], dict[str, Any]]
    """The body of Anthropic's messages -> that of a chat."""
    tokenize_chat: Callable[[bytes], bytes]
    """A chat's body -> that of /tokenize, which gives the same tokens; raises Unsupported,
    msgspec.DecodeError."""
    has_render: bool
    """Whether it has render endpoints, which give the tokens of any body."""


DIALECTS = {
    "vllm": Dialect(
        to_template=vllm.to_template,
        to_chat=vllm_messages.to_chat,
        tokenize_chat=vllm_tokenize.tokenize_chat,
        has_render=True,
    ),
    "sglang": Dialect(
        to_template=sglang.to_template,
        to_chat=sglang_messages.to_chat,
        tokenize_chat=sglang_tokenize.tokenize_chat,
        has_render=False,
    ),
}
"""Dialects by the engine's name in events/engines/table.py."""
DEFAULT = "vllm"
"""The engine whose treatment is reproduced where no worker is known."""
