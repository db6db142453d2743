"""Settings by which a model's prompts are rendered: frozen values, sent to child processes."""

from typing import Any, Literal

import msgspec

CACHE_BYTES = 64 << 20
MEMORY_BYTES = 2 << 30
"""Most address space of a process that renders, in bytes, without its cache. A small tokenizer
takes 0.2 GiB, and a body of 800,000 tokens 0.05 GiB more."""
TOKENS_MAX = 4 << 20
"""Tokens of one body, at most; more than any engine's context."""
PROMPTS_MAX = 1024
"""Prompts in one completion's list, at most."""


class RendererSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's tokenizer and the flags of its engines that change prompts."""

    folder: str
    """Folder with tokenizer.json, tokenizer_config.json and chat_template.jinja, as the model's
    release has them."""
    chat_template: str = ""
    """The engines' --chat-template: a file's path, or the template's text (which has a brace).
    Empty: the folder's template."""
    chat_template_kwargs: dict[str, Any] = {}
    """The engines' default keyword arguments of the template; a request's win."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """vLLM's --chat-template-content-format. auto: chosen by the template's syntax tree, as engines
    do."""
    tools_dropped: bool = False
    """vLLM's --exclude-tools-when-tool-choice-none. SGLang always leaves such tools out."""
    cache_bytes: int = CACHE_BYTES
    """Most bytes of the encoder's cache of text segments and their tokens; 0: no cache."""
    tokens_max: int = TOKENS_MAX
    """Most tokens of a body; a longer one is refused with PROMPT_TOO_LONG."""
