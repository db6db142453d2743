"""A model's chat template, compiled with the functions and filters that engines give to it.

Its environment is that of transformers' apply_chat_template (5.19, read 2026-11-22): Jinja's
sandbox, blocks trimmed, loop controls, `{% generation %}`, tojson without escapes, raise_exception,
strftime_now.

Law: a template that fails raises PromptError with the template's sentence, and nothing else.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from router.request.prompt_error import PromptError
from router.request.refusal import Reason
from router.request.rendering.content_format import loops_over_content, loops_over_named_content

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark behind the text to continue: its last blank is lost where the template strips
messages."""
MESSAGE_CHARACTERS_MAX = 500
"""Characters of a template's own sentence in an error, at most."""


_LATER_SYSTEM = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
_SHOWN = "a system message between others"


class _Generation(Extension):
    """The tag `{% generation %}`, which marks an answer's text for training and leaves it
    unchanged."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        inner = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], inner).set_lineno(line)

    def _text(self, caller: Macro) -> Any:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, faster for keys of plain dictionaries, which are most of what a chat
    template reads: the results are the same, but no exception is raised inside for each key."""

    @override
    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _OF_DICTIONARIES:
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        return self.undefined(obj=obj, name=attribute)

    @override
    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is not dict or type(argument) is not str or argument in _OF_DICTIONARIES:
            return super().getitem(obj, argument)
        if argument in obj:
            return obj[argument]
        return self.undefined(obj=obj, name=argument)


_OF_DICTIONARIES = frozenset(dir(dict))


class Template:
    """One compiled template."""

    def __init__(self, text: str, now: Callable[[], datetime]) -> None:
        """Raises PromptError (TEMPLATE_REFUSED) if the text is no template."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self.text = text
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except Exception as error:  # a syntax error, or one of Jinja's compiler
            raise _refused(error) from error
        self.names = frozenset(meta.find_undeclared_variables(tree))
        """Names that the template takes from its caller."""
        self.refuses_later_systems = self._tried(_LATER_SYSTEM) is None
        later = [*_LATER_SYSTEM[:2], {"role": "system", "content": _SHOWN}, _LATER_SYSTEM[3]]
        # SGLang tries it without the clock and without `{% generation %}`.
        shown = self._tried(later, strftime_now=environment.undefined(name="strftime_now"))
        self.shows_later_systems = _SHOWN in (shown or "") and "endgeneration" not in text
        self.loops_over_content = loops_over_content(tree)
        self.loops_over_named_content = loops_over_named_content(tree)

    def render(self, names: Mapping[str, Any]) -> str:
        """The prompt's text, as the model will read it. names: the template's variables."""
        try:
            return self._template.render(names)
        except Exception as error:  # a template may raise anything: types, recursion, sandbox
            raise _refused(error) from error

    def _tried(self, messages: list[dict[str, str]], **names: Any) -> str | None:
        """The text of these messages; None: the template fails."""
        try:
            return self.render({"messages": messages, "add_generation_prompt": False, **names})
        except PromptError:
            return None

    def render_continued(self, names: Mapping[str, Any]) -> str:
        """The text up to the end of the last message's, which transformers' continue_final_message
        finds by a mark behind it. names: as for `render`."""
        messages = list(names["messages"])
        if "content" not in self.text:
            raise _failed("the template prints no content of messages that could be continued")
        messages[-1], text = _marked(messages[-1])
        rendered = self.render({**names, "messages": messages})
        end = rendered.rfind(_MARK.strip())
        if end < 0 or text.strip() not in rendered:
            raise _failed("the template changes the final message, so it can't be continued")
        kept = rendered[end : end + len(_MARK)] == _MARK
        return rendered[:end] if kept else rendered[:end].rstrip()


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with a mark behind its text, and the text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    parts = list(content)
    for place in reversed(range(len(parts))):
        if "text" in parts[place]:
            text = parts[place]["text"]
            parts[place] = {**parts[place], "text": text + _MARK}
            return {**message, "content": parts}, text
    raise _failed("the final message has no text to continue")


def _failed(sentence: str) -> PromptError:
    return PromptError(Reason.TEMPLATE_REFUSED, f"the chat template failed: {sentence}")


def _refused(error: Exception) -> PromptError:
    return _failed(str(error)[:MESSAGE_CHARACTERS_MAX] or type(error).__name__)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
