"""Types of dialects; each turns a body into a chat template's input as one engine does. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.request.prompt_error import PromptError
from router.request.refusal import Reason


class ChatTemplate(Protocol):
    """Interface of a compiled template; router/request/rendering/template.py implements it with
    Jinja.
    """

    text: str
    names: frozenset[str]
    """Names of the variables that the template takes from its caller."""

    loops_over_content: bool
    """Whether vLLM gives this template message contents as lists of parts, by the template's syntax
    tree."""
    loops_over_named_content: bool
    """Whether SGLang gives it contents as lists of parts, by the names of the template's loop
    variables."""

    refuses_later_systems: bool
    """Whether the template fails for a system message that is not the first message."""

    shows_later_systems: bool
    """Whether the text shows a system message that stands between others, as SGLang tries it."""

    def render(self, names: Mapping[str, Any]) -> str:
        """The prompt's text, as the model will read it. names: the template's variables."""
        ...

    def render_continued(self, names: Mapping[str, Any]) -> str:
        """The prompt's text up to the end of the last message, which the model continues."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine knows of a model when it reads a body."""

    templates: Mapping[str, ChatTemplate]
    """Compiled templates by name."""
    chat_template_kwargs: Mapping[str, Any]
    """The engine's default keyword arguments of a template."""
    content_format: str
    """vLLM's --chat-template-content-format: auto, string or openai."""
    tools_dropped: bool
    """Whether the template gets no tools under tool_choice none, on vLLM."""

    def template_for(self, tools: object) -> ChatTemplate:
        """The template that transformers takes: `tool_use` if there are tools, else `default`.
        Raises PromptError if there is none."""
        if tools is not None and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if (template := self.templates.get("default")) is not None:
            return template
        raise _no_template("chat template named default" if self.templates else "chat template")

    @property
    def first_template(self) -> ChatTemplate:
        """The template that SGLang takes: the first, whatever its name. Raises PromptError if there
        is none."""
        if not self.templates:
            raise _no_template("chat template")
        return next(iter(self.templates.values()))


@dataclass(slots=True)
class TemplateInput:
    """Input of a chat template, and how the template's text becomes tokens."""

    messages: list[dict[str, Any]]
    template: ChatTemplate
    tools: list[dict[str, Any]] | None = None
    names: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template: keyword arguments of the request and of the engine."""
    documents: Any = None
    add_generation_prompt: bool = True
    specials: bool = False
    """Whether the tokenizer adds its special tokens around the text."""
    continues: bool = False
    """Whether the text ends with the last message's text, which the model continues."""
    suffix: str = ""
    """Text that follows the template's and is encoded separately, without the leading BOS token."""
    flat_tools_second: bool = False
    """Whether a template that fails is rendered once more, with tools as bare function objects."""


def _no_template(what: str) -> PromptError:
    return PromptError(Reason.NO_TOKENIZER, f"the tokenizer's folder has no {what}")
