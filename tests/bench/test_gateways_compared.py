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
from tests.bench.gateways_compared import (
    CHATS,
    CLIENTS,
    MIXES,
    ROBIN,
    Cell,
    Result,
    arriving,
    table_of,
)
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
    first = [turn["messages"][0]["content"] for turn in turns if turn.get("anew")]
    distinct = {"shared": 1, "agents": 1, "two-applications": 2}
    assert len(set(first)) == distinct.get(mix, len(turns))
    assert (len(set(map(len, first))) == 1) == (mix != "nothing-shared")
    assert len({turn["messages"][-1]["content"] for turn in turns}) == len(turns)


@pytest.mark.parametrize("mix", MIXES)
def test_arrivals_are_those_of_the_rate_and_keep_the_turns_of_a_chat_in_order(mix: str) -> None:
    sessions = MIXES[mix](random.Random(1))
    timed = arriving(sessions, 4.0, random.Random(2))
    assert timed == arriving(sessions, 4.0, random.Random(2))
    assert len(timed) == (CLIENTS if mix == "agents" else CLIENTS * CHATS)
    times = sorted(turn["at_s"] for turns in timed for turn in turns)
    assert len(times) == CLIENTS * CHATS
    assert times[-1] / len(times) == pytest.approx(1 / 4.0, rel=0.25)
    for turns in timed:
        assert [turn["at_s"] for turn in turns] == sorted(turn["at_s"] for turn in turns)
        assert [bool(turn.get("anew")) for turn in turns] == [True, *[False] * (len(turns) - 1)]
    plain = [
        {name: value for name, value in turn.items() if name != "at_s"}
        for turns in timed
        for turn in turns
    ]
    whole = [turn for turns in sessions for turn in turns]
    assert sorted(map(str, plain)) == sorted(map(str, whole))


def test_the_table_has_medians_over_the_seeds_and_the_ratio_to_the_round_robin() -> None:
    cell = Cell("agents", "even", "60")
    robin = Result(cell, ROBIN, 1, 144, 200.0, 180.0, 900.0, 190.0, 14.0, 0.8, 2.0)
    ours = [
        robin._replace(proxy="kvroute", seed=i, cpu_ms=5.0, p99_ms=i * 100.0) for i in (1, 2, 9)
    ]
    table = table_of([*ours, robin])
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["proxy"] == ["kvroute", ROBIN]
    assert cells["ratio"] == ["2.50", "1.00"]
    assert cells["p99"] == ["200", "900"]
