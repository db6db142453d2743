"""What a dialect gets and gives. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.prompts.prompt_error import PromptError, PromptReason


class ChatTemplate(Protocol):
    """A compiled template: router/prompts/template.py, which alone needs Jinja."""

    text: str
    names: frozenset[str]
    """Names that the template takes from its caller."""

    def render(self, names: Mapping[str, Any]) -> str:
        """The text that the model will read."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine knows of the model when it reads a body."""

    templates: Mapping[str, ChatTemplate]
    """Compiled, by name."""
    chat_template_kwargs: Mapping[str, Any]
    """The engine's defaults."""
    content_format: str
    """auto, string or openai."""
    tools_dropped: bool
    """Under tool_choice none, on vLLM."""

    def template_for(self, tools: object) -> ChatTemplate:
        """By transformers: `tool_use` if there are tools, else `default`."""
        if tools is not None and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if (template := self.templates.get("default")) is not None:
            return template
        raise PromptError(
            PromptReason.NO_TOKENIZER,
            "the tokenizer's folder has no chat template named default"
            if self.templates
            else "the tokenizer's folder has no chat template",
        )


@dataclass(slots=True)
class TemplateInput:
    """What the template is given, and what is done with its text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    names: dict[str, Any] = field(default_factory=dict)
    """More of them: keyword arguments of the request and of the engine."""
    documents: Any = None
    add_generation_prompt: bool = True
    specials: bool = False
    """Whether the tokenizer puts its own specials around the text."""
