"""Input and output of a dialect, an engine's treatment of a body. Pure."""

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
    """Names that the template takes from its caller."""

    loops_over_content: bool
    """Whether contents are wanted as lists of parts, by vLLM's reading of its syntax tree."""
    loops_over_named_content: bool
    """The same by SGLang's, which goes by the names of variables."""

    refuses_later_systems: bool
    """Whether a system message may only be the first."""

    shows_later_systems: bool
    """Whether a system message between others is shown, by SGLang's trial."""

    def render(self, names: Mapping[str, Any]) -> str:
        """The text that the model will read."""
        ...

    def render_continued(self, names: Mapping[str, Any]) -> str:
        """The text up to the end of the last message's text, which the model continues."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine knows of a model when it reads a body."""

    templates: Mapping[str, ChatTemplate]
    """Compiled, by name."""
    chat_template_kwargs: Mapping[str, Any]
    """The engine's defaults."""
    content_format: str
    """auto, string or openai."""
    tools_dropped: bool
    """Whether the template gets no tools under tool_choice none, on vLLM."""

    def template_for(self, tools: object) -> ChatTemplate:
        """The template that transformers takes: `tool_use` if there are tools, else `default`."""
        if tools is not None and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if (template := self.templates.get("default")) is not None:
            return template
        raise _no_template("chat template named default" if self.templates else "chat template")

    @property
    def first_template(self) -> ChatTemplate:
        """The only one on SGLang, whatever its name."""
        if not self.templates:
            raise _no_template("chat template")
        return next(iter(self.templates.values()))


@dataclass(slots=True)
class TemplateInput:
    """What the template is given, and what is done with its text."""

    messages: list[dict[str, Any]]
    template: ChatTemplate
    tools: list[dict[str, Any]] | None = None
    names: dict[str, Any] = field(default_factory=dict)
    """More of them: keyword arguments of the request and of the engine."""
    documents: Any = None
    add_generation_prompt: bool = True
    specials: bool = False
    """Whether the tokenizer puts its own specials around the text."""
    continues: bool = False
    """Whether the text ends with the last message's."""
    suffix: str = ""
    """Text after the template's, encoded apart, without the first token of a prompt."""
    flat_tools_second: bool = False
    """Whether a template that fails gets a second try, with tools as bare functions."""


def _no_template(what: str) -> PromptError:
    return PromptError(Reason.NO_TOKENIZER, f"the tokenizer's folder has no {what}")
