"""The section `models: prompts`: how a model's prompts that come without tokens get them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from events.plane.settings import Settings


class PromptsSettings(Settings, frozen=True):
    """Of one model."""

    source: Annotated[
        Literal["auto", "local", "engine", "off"],
        Meta(
            description="auto: the router's own tokens where they are proven, else an engine's;"
            " local: its own alone; engine: an engine's alone; off: none, so that lengths are"
            " estimated"
        ),
    ] = "auto"
    folder: Annotated[
        str | None,
        Meta(
            description="folder with tokenizer.json, tokenizer_config.json and"
            " chat_template.jinja, as the model's release has them; none: engines give the tokens"
        ),
    ] = None
    chat_template: Annotated[
        str,
        Meta(description="the engines' --chat-template, a file or a text; empty: the folder's own"),
    ] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="the engines' default keyword arguments of the chat template"),
    ] = msgspec.field(default_factory=dict)
    content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="vLLM's --chat-template-content-format"),
    ] = "auto"
    tools_dropped: Annotated[
        bool, Meta(description="vLLM runs with --exclude-tools-when-tool-choice-none")
    ] = False
    render: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s/]+)?$",
            description="address of a render service (vllm launch render), which gives tokens in"
            " the place of workers; empty: none",
        ),
    ] = ""
    processes: Annotated[
        int, Meta(ge=1, le=64, description="child processes that render this model's prompts")
    ] = 2
    cache_mib: Annotated[
        int, Meta(ge=0, le=65_536, description="memory for tokens of text segments, per process")
    ] = 64
    memory_mib: Annotated[
        int,
        Meta(
            ge=256,
            le=1 << 20,
            description="address space of each of these processes beside cache_mib, in MiB: a"
            " template that takes more ends its own prompt",
        ),
    ] = 2048
    audit_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of prompts with proven tokens that are compared with an engine's"
            " tokens after the fact",
        ),
    ] = 0.001
