"""Tests of the comparison of gateways: its tokenizer and its mixes."""

import json
import random
from array import array
from pathlib import Path

import pytest

from router.request import bodies
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from simulator.live.completion_wire import ChatRequest, Message
from tests.bench.gateway_peers import CHATS, CLIENTS, MIXES, Result, table_of
from tests.stage.prompts.byte_tokenizer import make_folder


def test_the_router_makes_the_tokens_of_the_stand_ins(tmp_path: Path) -> None:
    renderer = Renderer(RendererSettings(folder=str(make_folder(tmp_path))))
    messages = [("system", "é\n 😀\x00"), ("user", "a  b"), ("assistant", ""), ("user", "?")]
    body = {"messages": [{"role": role, "content": text} for role, text in messages]}
    done = renderer.render(bodies.CHAT, json.dumps(body).encode(), "vllm")
    chat = ChatRequest(messages=[Message(role, text) for role, text in messages])
    assert array("I", done.token_bytes).tolist() == chat.token_ids()


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_is_the_same_at_each_call_and_shares_what_its_name_says(mix: str) -> None:
    sessions = MIXES[mix](random.Random(1))
    assert sessions == MIXES[mix](random.Random(1))
    turns = [turn for session in sessions for turn in session]
    assert len(turns) == CLIENTS * CHATS
    systems = [turn["messages"][0]["content"] for turn in turns if len(turn["messages"]) > 1]
    distinct = {"shared": 1, "agents": 1, "two-applications": 2, "nothing-shared": len(turns)}
    assert len(set(systems)) == distinct[mix]
    assert len({turn["messages"][-1]["content"] for turn in turns}) == len(turns)


def test_the_table_has_each_proxy_s_ratio_to_the_round_robin() -> None:
    robin = Result("agents", "round robin (aiohttp)", 144, 200.0, 190.0, 14.0, 0.8, 2.0)
    table = table_of([robin._replace(proxy="kvroute", cpu_ms=5.0), robin])
    assert list(table.columns[-1].cells) == ["2.50", "1.00"]
