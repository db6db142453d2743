"""The Prompts calls of a client: the tokens of a text or a body, and how far they are proven."""

from typing import Literal

from kvroute.client.connections.transport import Transport
from kvroute.client.messages.bodies import Body
from kvroute.client.messages.options import RouteOptions, render_request
from kvroute.v1 import (
    ListTokenizersRequest,
    PromptSource,
    RenderResponse,
    Tokenizer,
)

_SOURCES = {
    None: PromptSource.PROMPT_SOURCE_UNSPECIFIED,
    "local": PromptSource.PROMPT_SOURCE_LOCAL,
    "engine": PromptSource.PROMPT_SOURCE_ENGINE,
}


class PromptCalls:
    """The part of KvRouteClient that calls the Prompts service."""

    _transport: Transport

    async def render(
        self,
        *,
        model: str | None = None,
        text: str | None = None,
        chat_completion_body: Body | None = None,
        completion_body: Body | None = None,
        messages_body: Body | None = None,
        responses_body: Body | None = None,
        source: Literal["local", "engine"] | None = None,
        timeout_s: float | None = None,
    ) -> RenderResponse:
        """The tokens of a prompt; routes nothing.

        The prompt and the model are those of RouteOptions. source: only the router's own rendering
        (local) or an engine of the model; absent: as for a route that requires tokens. Raises
        NoTokens where the tokens can't be made.
        """
        options: RouteOptions = {
            "model": model,
            "text": text,
            "chat_completion_body": chat_completion_body,
            "completion_body": completion_body,
            "messages_body": messages_body,
            "responses_body": responses_body,
            "cache_salt": "",  # of no matter for tokens
        }
        message = render_request(options)
        message.source = _SOURCES[source]
        return await self._transport.unary(lambda line: line.prompts.Render, message, timeout_s)

    async def list_tokenizers(
        self, model: str | None = None, *, timeout_s: float | None = None
    ) -> list[Tokenizer]:
        """The tokenizer of each model in one router, with the shapes of prompts whose tokens were
        compared with engines; absent model: all models. Each router has its own."""
        message = ListTokenizersRequest(model=model or "")
        response = await self._transport.unary(
            lambda line: line.prompts.ListTokenizers, message, timeout_s
        )
        return list(response.tokenizers)
