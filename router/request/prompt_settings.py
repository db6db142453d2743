"""How one model's prompts are rendered: plain, frozen values, which cross to a child process."""

from typing import Any, Literal

import msgspec

CACHE_BYTES = 64 << 20
MEMORY_BYTES = 2 << 30
"""Address space of a process that renders, beside the cache. It takes 0.2 GiB with a small
tokenizer, and 0.05 GiB more for a body of 800,000 tokens."""
TOKENS_MAX = 4 << 20
"""Tokens of one body, at most; more than any engine's context."""
PROMPTS_MAX = 1024
"""Prompts in one completion's list, at most."""


class RendererSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's tokenizer and the flags of its engines that change prompts."""

    folder: str
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as the model's release has
    them."""
    chat_template: str = ""
    """A template's file, or its text (has a brace): the engines' --chat-template. Empty: the
    folder's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """The engines' default keyword arguments of the template; a request's win."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """vLLM's --chat-template-content-format. auto: by the template's syntax tree, as engines do."""
    tools_dropped: bool = False
    """vLLM's --exclude-tools-when-tool-choice-none. SGLang always drops them."""
    cache_bytes: int = CACHE_BYTES
    """Bytes of text segments and their tokens, kept by the encoder; 0: no cache."""
    tokens_max: int = TOKENS_MAX
    """A body with more tokens has none: PROMPT_TOO_LONG."""
