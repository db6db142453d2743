"""A model's chat template, with the names that engines give to it.

Its environment is that of transformers' apply_chat_template (5.19, read 2026-11-22): Jinja's
sandbox, blocks trimmed, loop controls, `{% generation %}`, tojson without escapes,
raise_exception, strftime_now.

Law: a template that fails raises PromptError with its own sentence, and nothing else.
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

from router.prompts.prompt_error import PromptError, PromptReason

MESSAGE_CHARACTERS_MAX = 500
"""Of a template's own sentence in an error."""


class _Generation(Extension):
    """`{% generation %}` marks an answer's text for training, and changes nothing of it."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        inner = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], inner).set_lineno(line)

    def _text(self, caller: Macro) -> Any:
        return caller()


class Template:
    """One compiled template."""

    def __init__(self, text: str, now: Callable[[], datetime]) -> None:
        """Raises PromptError (TEMPLATE_REFUSED) if the text is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self.text = text
        try:
            self.tree = environment.parse(text)
            self._template = environment.from_string(text)
        except Exception as error:  # a syntax error, or one of Jinja's compiler
            raise _refused(error) from error
        self.names = frozenset(meta.find_undeclared_variables(self.tree))
        """Names that the template takes from its caller."""

    def render(self, names: Mapping[str, Any]) -> str:
        """The text that the model will read."""
        try:
            return self._template.render(names)
        except Exception as error:  # a template may raise anything: types, recursion, sandbox
            raise _refused(error) from error


def _refused(error: Exception) -> PromptError:
    sentence = str(error)[:MESSAGE_CHARACTERS_MAX] or type(error).__name__
    return PromptError(PromptReason.TEMPLATE_REFUSED, f"the chat template failed: {sentence}")


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
