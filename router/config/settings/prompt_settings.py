"""The section `models: prompts`: how a model's prompts that come without tokens get them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from events.plane.settings import Settings


class PromptsSettings(Settings, frozen=True):
    """Source of the tokens of one model's prompts that come without tokens."""

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
