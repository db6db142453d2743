"""The demo's last part: chats through a gateway, with each pick's reason."""

import io
import re

import pytest
from rich.console import Console

from kvroute.v1 import CandidateRow
from kvroute.v1.router_pb2 import OverlapTokens
from simulator.cli.demo_chats import reason, show_chats


@pytest.mark.long
async def test_each_chat_is_answered_and_its_pick_has_a_reason() -> None:
    output = io.StringIO()
    assert await show_chats(Console(file=output, width=100))
    line = r"^  (\w+), turn (\d) +[\d,]+ tokens -> (\S+): (.+)$"
    rows = re.findall(line, output.getvalue(), re.MULTILINE)
    assert [(name, turn) for name, turn, *_ in rows] == [
        ("Ann", "1"), ("Bob", "1"), ("Cem", "1"), ("Ann", "2"), ("Cem", "2"),
        ("Dee", "1"), ("Eli", "1"), ("Fay", "1"),
    ]  # fmt: skip
    workers = [worker for *_, worker, _ in rows]
    reasons = [each for *_, each in rows]
    assert workers[0] == workers[1] == workers[3], "where the shop's rules are"
    assert reasons[0] == reasons[2] == "no engine has computed any of it"
    assert all(re.fullmatch(r"it holds [\d,]+ of them", reasons[at]) for at in (1, 3, 4))
    reused = re.search(r"reused ([\d,]+) of ([\d,]+) prompt tokens", output.getvalue())
    assert reused is not None
    cached, prompts = (int(text.replace(",", "")) for text in reused.groups())
    assert 0 < cached < prompts


def row(worker_id: str, usable: int, excluded: str = "") -> CandidateRow:
    overlap = OverlapTokens(usable=usable)
    return CandidateRow(worker_id=worker_id, overlap_tokens=overlap, excluded=excluded)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "no engine has computed any of it"),
        ([row("a", 0), row("b", 0)], "no engine has computed any of it"),
        ([row("a", 1024), row("b", 64)], "it holds 1,024 of them"),
        ([row("a", 64), row("b", 64)], "it holds 64 of them"),
        ([row("a", 64), row("b", 1024)], "b holds 1,024 of them, but has more requests"),
        ([row("a", 64), row("b", 1024, "full")], "b holds 1,024 of them, but is full"),
        ([row("b", 1024)], "b holds 1,024 of them, but has more requests"),
    ],
)
def test_the_reason_of_a_pick_is_read_from_the_rows(
    rows: list[CandidateRow], sentence: str
) -> None:
    assert reason(rows, "a") == sentence
