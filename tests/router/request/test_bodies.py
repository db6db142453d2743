"""The table of body formats beside the contract and the client, and tokens by a record alone."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvroute.client.messages import bodies as of_client
from kvroute.v1 import RenderRequest, RouteRequest
from router.request.bodies import (
    BY_NAME,
    CHAT,
    COMPLETION,
    FORMATS,
    MESSAGES,
    PATHS,
    TEXT,
    WITH_TOKENS,
    BodyFormat,
)
from router.request.dialects.table import DIALECTS
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from tests.stage.prompts.bodies import CHATS, COMPLETIONS
from tests.stage.prompts.bodies import MESSAGES as OF_MESSAGES
from tests.stage.prompts.renderers import of_template


def test_no_two_formats_share_a_name_a_path_or_a_field_of_the_contract() -> None:
    assert len(BY_NAME) == len(FORMATS)
    assert len(PATHS) == sum(len(kind.paths) for kind in FORMATS)
    assert len(WITH_TOKENS) == sum(bool(kind.option) for kind in FORMATS)
    assert all(kind.paths or kind.text_of is not None for kind in FORMATS)


@pytest.mark.parametrize("message", [RouteRequest, RenderRequest])
def test_the_contract_has_a_field_for_each_format_with_tokens(message: Any) -> None:
    fields = [each.name for each in message.DESCRIPTOR.oneofs_by_name["prompt"].fields]
    assert sorted(WITH_TOKENS) == sorted(
        name for name in fields if name == TEXT.option or name.endswith("_body")
    )


def test_the_client_posts_each_body_to_its_path() -> None:
    assert {
        option: kind.paths[0] for option, kind in WITH_TOKENS.items() if kind.paths
    } == of_client.PATHS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("folder"))


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (CHAT, json.dumps(CHATS["user"]).encode()),
        (COMPLETION, json.dumps(COMPLETIONS["texts"]).encode()),
        (MESSAGES, json.dumps(OF_MESSAGES["system"]).encode()),
        (TEXT, b"hello"),
    ],
    ids=lambda value: value.name if isinstance(value, BodyFormat) else "",
)
def test_a_record_under_another_name_has_the_same_tokens(
    folder: RendererSettings, kind: BodyFormat, data: bytes, engine: str
) -> None:
    renderer = Renderer(folder)
    copied = renderer.render(replace(kind, name="copy"), data, engine)
    rendered = renderer.render(kind, data, engine)
    assert copied.token_bytes == rendered.token_bytes
    if kind.text_of is None:
        assert copied.shape == rendered.shape.replace(kind.name, "copy", 1)
