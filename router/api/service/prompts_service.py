"""The service kvroute.v1.Prompts: tokens of prompts, and how the router's compare with engines'."""

import asyncio
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from kvroute.v1 import prompts_pb2, router_pb2
from router.api.desk import text_codec
from router.api.desk.request_codec import no_valid
from router.api.desk.tenant import Caller, caller_of
from router.api.service.calls import Context
from router.api.service.texts import Texts
from router.net.keys.door import CURRENT
from router.request.proving.proof import Target, Trust
from router.request.refusal import Reason, Refusal
from router.request.tokens import ModelPrompts, Prompts, Source
from router.request.wire.received import ReceivedRequest, request_of

_SOURCES = {
    router_pb2.PROMPT_SOURCE_LOCAL: Source.LOCAL,
    router_pb2.PROMPT_SOURCE_ENGINE: Source.ENGINE,
}


class PromptsService:
    """Handlers of the service kvroute.v1.Prompts."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def Render(self, request: bytes, context: Context) -> bytes:
        caller = caller_of(CURRENT.get())
        if caller.usage is not None:
            caller.usage.request(reserves=False)
        text, source = read_render(request, caller)
        made = await self._texts.tokens(text, context.left_s, source)
        items = [
            router_pb2.MultimodalItem(
                id=item.id, first_token=item.first_token, token_count=item.token_count
            )
            for item in made.items
        ]
        prompt = text_codec.write_prompt(made, returns_tokens=True)
        answer = prompts_pb2.RenderResponse(prompt=prompt, multimodal_items=items)
        return answer.SerializeToString()

    async def ListTokenizers(
        self, request: prompts_pb2.ListTokenizersRequest, context: Context
    ) -> prompts_pb2.ListTokenizersResponse:
        answer = prompts_pb2.ListTokenizersResponse()
        prompts = self._texts.prompts
        for name in known_models(prompts):
            if not request.model or name == request.model:
                answer.tokenizers.append(tokenizer(prompts, name))
                await asyncio.sleep(0)
        return answer


def read_render(content: bytes, caller: Caller) -> tuple[ReceivedRequest, Source | None]:
    """Reads a RenderRequest: the request whose tokens are wanted, and the source of the tokens
    (None: the configured source); raises Refusal, also for a model that the caller may not use.
    """
    try:
        message = prompts_pb2.RenderRequest.FromString(content)
    except DecodeError as error:
        raise no_valid("RenderRequest", error) from None
    field = message.WhichOneof("prompt")
    if field is None:
        raise Refusal(Reason.EMPTY_PROMPT, "the request has no text and no body")
    if message.source == router_pb2.PROMPT_SOURCE_ESTIMATE:
        raise Refusal(Reason.INVALID_FIELD, "source is ESTIMATE, which makes no tokens")
    prompt: str | bytes = getattr(message, field)
    request = request_of(
        router_pb2.RouteRequest.DESCRIPTOR.fields_by_name[field].number,
        prompt.encode() if isinstance(prompt, str) else prompt,
        {"model": message.model, "require_tokens": True},
    )
    return text_codec.read_text(request, caller), _SOURCES.get(message.source)


def known_models(prompts: Prompts) -> Iterator[str]:
    """Models with a configuration of prompts, then other models whose tokens were compared."""
    compared = {name for name, *_ in prompts.proof}
    yield from sorted(prompts.models)
    yield from sorted(compared - prompts.models.keys())


def tokenizer(prompts: Prompts, name: str) -> prompts_pb2.Tokenizer:
    """What the router knows of a model's tokenizer."""
    settings = prompts.models.get(name, ModelPrompts())
    return prompts_pb2.Tokenizer(
        model=name,
        source=settings.source.value,
        digest=prompts.digests.get(name, ""),
        fault=prompts.faults.get(name, ""),
        shapes=[
            _shape(target, shape, trust)
            for model, target, shape, trust in prompts.proof
            if model == name
        ],
    )


def _shape(target: Target, shape: str, trust: Trust) -> prompts_pb2.ShapeTrust:
    written = prompts_pb2.ShapeTrust(
        engine=target.engine,
        engine_version=target.version,
        shape=shape,
        state=trust.state.value,
        compared=trust.compared,
    )
    difference = trust.difference
    if difference is not None and difference.at is not None:
        written.first_difference = difference.at
        written.own_token, written.engine_token = difference.own, difference.engine
    return written
