"""One model's renderer: a body's bytes in, the tokens that its engine computes out.

Law: a body has tokens, or raises PromptError; no other exception leaves `render`.
"""

from array import array
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from router.request.bodies import BodyFormat, Templated
from router.request.dialects.dialect import ChatTemplate, ModelFacts, TemplateInput
from router.request.dialects.table import DIALECTS
from router.request.prompt_error import PromptError, unsupported
from router.request.prompt_settings import RendererSettings
from router.request.refusal import Reason
from router.request.rendering.body import Body, completion_prompts, read_body
from router.request.rendering.encoder import TOKEN_BYTES, load_encoder, token_bytes
from router.request.rendering.folder import no_tokenizer, read_folder, read_text
from router.request.rendering.shape import shape_of


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A body's tokens."""

    token_bytes: bytes
    """The ids of the prompt (of the first, where a completion has several), little-endian, 4 bytes
    each."""
    count: int
    """Number of these ids."""
    usage_tokens: int
    """The prompt tokens that the engine will report as usage: all prompts of the body."""
    shape: str


class Renderer:
    """Makes the tokens of bodies for one model, from its tokenizer's folder. Not for two threads at
    once."""

    def __init__(
        self,
        settings: RendererSettings,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """now: the engines' local time, for templates that print a date.

        Raises PromptError: NO_TOKENIZER, or TEMPLATE_REFUSED for a template that can't compile.
        """
        folder = read_folder(Path(settings.folder))
        self._settings = settings
        self._specials = folder.specials
        self._encoder = load_encoder(folder, settings.cache_bytes)
        self._bos = self._encoder.id_bytes(folder.specials.get("bos_token", ""))
        self._facts = ModelFacts(
            {
                name: _compiled(text, now)
                for name, text in _templates(settings, folder.templates).items()
            },
            settings.chat_template_kwargs,
            settings.content_format,
            settings.tools_dropped,
        )
        self.digest = folder.digest
        """Digest of the folder, equal for two folders that give the same tokens."""

    def render(self, kind: BodyFormat, data: bytes, engine: str) -> Rendered:
        """The tokens that an engine computes for the body. engine: its kind, such as vllm. Raises
        PromptError."""
        body = read_body(kind, data)
        shape = shape_of(body)
        try:
            return self._rendered(body, shape, engine)
        except PromptError as error:
            error.shape = shape
            raise
        except (RecursionError, UnicodeEncodeError) as error:  # nested too deep; a lone surrogate
            message = f"the router can't render the body: {error}"
            raise PromptError(Reason.UNSUPPORTED_CONTENT, message, shape) from None

    def text_of(self, data: bytes) -> str:
        """The text of token bytes, for a person."""
        return self._encoder.text_of(array("I", data).tolist())

    def _rendered(self, body: Body, shape: str, engine: str) -> Rendered:
        form = body.kind.templated
        if form is None:
            prompts = self._completion(body.fields)
        else:
            prompts = [self._templated(body, form, engine)]
        usage_tokens = sum(map(len, prompts)) // TOKEN_BYTES
        if usage_tokens > self._settings.tokens_max:
            raise PromptError(
                Reason.PROMPT_TOO_LONG,
                f"the body has {usage_tokens} tokens; {self._settings.tokens_max} are allowed",
            )
        return Rendered(
            token_bytes=prompts[0],
            count=len(prompts[0]) // TOKEN_BYTES,
            usage_tokens=usage_tokens,
            shape=shape,
        )

    def _completion(self, fields: dict[str, Any]) -> list[bytes]:
        return [
            self._encoder.encode(prompt, specials=specials)
            if isinstance(prompt, str)
            else token_bytes(prompt)
            for prompt, specials in completion_prompts(fields)
        ]

    def _templated(self, body: Body, form: Templated, engine: str) -> bytes:
        to_template = DIALECTS[engine].templates.get(form)
        if to_template is None:
            raise unsupported(
                f"kvroute makes no tokens of {body.kind.name} for {engine}; the engine does"
            )
        given = to_template(body.fields, self._facts)
        ids = self._encoder.encode(self._text(given), specials=given.specials)
        if given.suffix:
            more = self._encoder.encode(given.suffix, specials=True)
            ids += more.removeprefix(self._bos)
        return ids

    def _text(self, given: TemplateInput) -> str:
        names = {
            **self._specials,
            **given.names,
            "messages": given.messages,
            "tools": given.tools,
            "documents": given.documents,
            "add_generation_prompt": given.add_generation_prompt,
        }
        if given.continues:
            return given.template.render_continued(names)
        try:
            return given.template.render(names)
        except PromptError:
            if not given.flat_tools_second or not given.tools:
                raise
            flat = [tool["function"] for tool in given.tools]
            return given.template.render({**names, "tools": flat})


def _compiled(text: str, now: Callable[[], datetime]) -> ChatTemplate:
    try:
        from router.request.rendering.template import Template
    except ImportError as error:
        raise no_tokenizer(
            f"{error.name} is not installed: pip install 'kvroute[prompts]'"
        ) from error
    return Template(text, now)


def _templates(settings: RendererSettings, own: Mapping[str, str]) -> Mapping[str, str]:
    flag = settings.chat_template
    if not flag:
        return own
    if "{" in flag:
        return {"default": flag}
    text = read_text(Path(flag))
    if text is None:
        raise no_tokenizer(f"there is no file {flag} with a chat template")
    return {"default": text}
