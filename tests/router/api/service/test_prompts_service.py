"""kvroute.v1.Prompts over gRPC: tokens by a real child process or a real HTTP engine."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from kvroute.v1 import prompts_pb2, prompts_pb2_grpc, router_pb2
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from router.request.tokens import ModelPrompts, Source
from tests.router.api.service.test_texts import TEMPLATE, with_worker
from tests.stage.prompts.engine import CHAT, StandIn, chat, quiet, serving
from tests.stage.prompts.tiny_tokenizer import make_folder
from tests.stage.served import Served, refusal

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    folder: Path = make_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    return RendererSettings(folder=str(folder))


def stub(stage: Served) -> Any:
    return prompts_pb2_grpc.PromptsStub(stage.channel)


def render(source: Any = router_pb2.PROMPT_SOURCE_UNSPECIFIED, **prompt: Any) -> Any:
    return prompts_pb2.RenderRequest(model="m", source=source, **prompt)


async def test_a_body_is_rendered_and_nothing_is_routed(settings: RendererSettings) -> None:
    done = Renderer(settings).render(CHAT, chat(), "vllm")
    prompts = {"m": ModelPrompts(source=Source.LOCAL, renderer=settings, processes=1)}
    async with with_worker(models_prompts=prompts) as stage:
        before = stage.state()
        answer = await stub(stage).Render(render(chat_completion_body=chat()))
        assert answer.prompt.token_bytes == done.token_bytes
        assert answer.prompt.count == done.count
        assert answer.prompt.source == router_pb2.PROMPT_SOURCE_LOCAL
        assert stage.state() == before


async def test_a_request_names_where_tokens_come_from_and_shapes_show_what_was_compared(
    settings: RendererSettings,
) -> None:
    prompts = {"m": ModelPrompts(renderer=settings, processes=1)}
    async with (
        serving(StandIn(settings)) as engine,
        with_worker(models_prompts=prompts, address=engine.address) as stage,
    ):
        wanted = render(router_pb2.PROMPT_SOURCE_ENGINE, chat_completion_body=chat())
        theirs = await stub(stage).Render(wanted)
        assert theirs.prompt.source == router_pb2.PROMPT_SOURCE_ENGINE
        wanted = render(router_pb2.PROMPT_SOURCE_LOCAL, chat_completion_body=chat())
        ours = await stub(stage).Render(wanted)
        assert ours.prompt.source == router_pb2.PROMPT_SOURCE_LOCAL
        assert ours.prompt.token_bytes == theirs.prompt.token_bytes
        await quiet(stage.texts.prompts)
        listed = await stub(stage).ListTokenizers(prompts_pb2.ListTokenizersRequest())
        (tokenizer,) = listed.tokenizers
        assert (tokenizer.model, tokenizer.source, tokenizer.fault) == ("m", "auto", "")
        assert tokenizer.digest == ours.prompt.tokenizer_digest
        assert {"chat"} <= {shape.shape for shape in tokenizer.shapes}
        assert all(shape.state == "proven" for shape in tokenizer.shapes)
        other = prompts_pb2.ListTokenizersRequest(model="another")
        assert not (await stub(stage).ListTokenizers(other)).tokenizers


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (render(), Code.INVALID_ARGUMENT, "EMPTY_PROMPT"),
        (render(text=""), Code.INVALID_ARGUMENT, "EMPTY_PROMPT"),
        (render(chat_completion_body=b"{"), Code.INVALID_ARGUMENT, "MALFORMED_BODY"),
        (
            render(router_pb2.PROMPT_SOURCE_ESTIMATE, text="x"),
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        (
            prompts_pb2.RenderRequest(model="m" * 2000, text="x"),
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        (
            render(router_pb2.PROMPT_SOURCE_ENGINE, text="x"),
            Code.UNAVAILABLE,
            "RENDERER_UNAVAILABLE",
        ),
    ],
)
async def test_a_prompt_that_can_t_be_rendered_says_why(
    settings: RendererSettings, request_: Any, code: Any, reason: str
) -> None:
    prompts = {"m": ModelPrompts(renderer=settings, processes=1)}
    async with with_worker(models_prompts=prompts) as stage:
        refused = await refusal(stub(stage).Render(request_))
        assert (refused.code, refused.reason) == (code, reason)
