"""The section `models: prompts`: how a model's prompts that come without tokens get them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from events.plane.settings import Settings


class PromptsSettings(Settings, frozen=True):
    """How the tokens of one model's prompts are made, where prompts come without tokens."""

    source: Annotated[
        Literal["auto", "local", "engine", "off"],
        Meta(
            description="where a text prompt's tokens come from. auto: from the router's own"
            " tokenizer where its tokens were compared with an engine's, else from an engine;"
            " local: from the router's tokenizer alone; engine: from an engine alone; off: from"
            " nowhere, so that lengths are estimated"
        ),
    ] = "auto"
    folder: Annotated[
        str | None,
        Meta(
            description="folder with the model's tokenizer.json, tokenizer_config.json and"
            " chat_template.jinja; none: engines give the tokens"
        ),
    ] = None
    chat_template: Annotated[
        str,
        Meta(
            description="chat template, a file or a text, as in the engines' --chat-template;"
            " empty: the template in the folder"
        ),
    ] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(
            description="default keyword arguments of the chat template, as the engines are"
            " configured"
        ),
    ] = msgspec.field(default_factory=dict)
    content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="form of messages' content that the chat template gets, as vLLM's"
            " --chat-template-content-format"
        ),
    ] = "auto"
    tools_dropped: Annotated[
        bool, Meta(description="vLLM was started with --exclude-tools-when-tool-choice-none")
    ] = False
    render: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s/]+)?$",
            description="HTTP base URL of a render service (`vllm launch render`), which makes"
            " tokens instead of the workers; empty: the workers make them",
        ),
    ] = ""
    processes: Annotated[
        int, Meta(ge=1, le=64, description="child processes that render this model's prompts")
    ] = 2
