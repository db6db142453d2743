"""What `kvroute workers` and `kvroute explain` print."""

from pathlib import Path
from typing import Any

import click
import pytest

from kvroute.v1 import Explanation, Receipt
from router.app.calls.dialing import CallFailed
from router.app.calls.explanation import (
    Question,
    _print_explanation,
    _read_tokens,
    show_explanation,
)
from router.app.calls.fleet import WIDTH_MIN, show_workers
from router.app.cli.text import console
from router.decide.core.progress import Progress, ProgressState
from router.fleet.reservations.reservations import Ending
from router.request.request import Role
from tests.stage.fleet import prompt
from tests.stage.served import Served, served


async def listed(stage: Served, capsys: pytest.CaptureFixture[str]) -> str:
    """What `kvroute workers` prints."""
    target = f"127.0.0.1:{stage.server.port}"
    assert await show_workers(target, "", as_json=False, timeout_s=60.0) == 0
    return capsys.readouterr().out


async def test_warnings_stand_under_the_table_word_for_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served() as stage:
        # The second looks like rich's markup, and ends a tag that nobody began.
        stage.fleet.add("w0", 1, warnings=("an odd thing", "[bold]connect[/] [errno 111] failed"))
        stage.fleet.add("w1", model="n")
        lines = (await listed(stage, capsys)).splitlines()
        assert lines[-2:] == ["w0/1: an odd thing", "w0/1: [bold]connect[/] [errno 111] failed"]


async def test_an_ejected_worker_is_shown_with_its_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served() as stage:
        stage.fleet.add("w0")
        core, now_s = stage.fleet.core, stage.fleet.now_s
        held = stage.fleet.route(prompt(100)).reservation.id
        core.report(Progress(held, ProgressState.FAILED, failure=Ending.FAILED_REFUSED), now_s)
        line = (await listed(stage, capsys)).splitlines()[-1]
        assert line.startswith("w0/0: ejected (refused, 1 in a row); gets requests again: not befo")
        stage.fleet.turn(2)
        line = (await listed(stage, capsys)).splitlines()[-1]
        assert "being probed with a few requests" in line


@pytest.mark.parametrize("as_json", [False, True])
async def test_too_few_workers_that_can_get_requests_are_an_exit_code(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    async with served() as stage:
        target = f"127.0.0.1:{stage.server.port}"

        async def shown(required: int) -> int:
            return await show_workers(target, "", as_json, 60.0, required)

        assert [await shown(required) for required in (0, 1)] == [0, 1]
        assert "0 of 0 workers can get requests, fewer than --require 1" in capsys.readouterr().err
        stage.fleet.add("w0")
        stage.fleet.add("w1")
        assert [await shown(required) for required in (0, 1, 2, 3)] == [0, 0, 0, 1]
        stage.fleet.core.fleet.drained["w1"] = None
        assert [await shown(required) for required in (1, 2)] == [0, 1]
        assert "1 of 2 workers" in capsys.readouterr().err


async def explained(stage: Served, capsys: pytest.CaptureFixture[str], **asked: Any) -> str:
    target = f"127.0.0.1:{stage.server.port}"
    try:
        await show_explanation(target, Question(**asked), timeout_s=60.0)
    except CallFailed as error:
        return error.message
    return capsys.readouterr().out


async def test_a_pair_is_explained_in_two_stages(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as stage:
        stage.fleet.add("p", role="prefill")
        stage.fleet.add("d", role="decode")
        tokens = ",".join(map(str, range(600)))
        told = await explained(stage, capsys, tokens=tokens, phase="prefill_decode")
        prompt_part, answer_part = told.split("the answer:")
        assert "by a worker that hands its KV cache over" in prompt_part
        assert "prefill-queue" in prompt_part
        assert "decode-room" in answer_part
        arrows = [line.split() for line in told.splitlines() if line.startswith("->")]
        assert [words[1] for words in arrows] == ["p/0", "d/0"]
        told = await explained(stage, capsys, tokens="1,2,3", phase="prefill_decode")
        assert "by the worker that decodes" in told
        arrows = [line.split() for line in told.splitlines() if line.startswith("->")]
        assert [words[1] for words in arrows] == ["d/0"]


async def test_a_session_is_explained_without_its_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served() as stage:
        stage.fleet.add("d", role="decode")
        told = await explained(stage, capsys, phase="decode", session="s")
        assert "no worker is known to hold session 's'" in told
        stage.fleet.route(prompt(600), role=Role.DECODE, session_id="s")
        assert "decode-room" in await explained(stage, capsys, phase="decode", session="s")


async def test_roles_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as stage:
        stage.fleet.add("p", role="prefill")
        stage.fleet.add("w")
        head, *rows = (await listed(stage, capsys)).splitlines()
        place = head.index("role")
        assert [row[place:].split()[0] for row in rows] == ["prefill", "both"]


EVIL = {
    "http://[fd00::12]:8000": "http://[fd00::12]:8000",
    "org/m[awq]": "org/m[awq]",
    "m[/x]": "m[/x]",
    "[red]m[/]": "[red]m[/]",
    "m:smile:": "m:smile:",
    "モデル": "モデル",
}
"""Names, and how a terminal is to show them."""
CONTROL = {
    "m\x1b[2J\x07": r"m\x1b[2J\x07",
    "m\x9b2J": r"m\x9b2J",
    "m\r\nfake": r"m\r\nfake",
    "m\u202etxt": r"m\u202etxt",
}
"""Texts that no name of a worker has, and how a terminal is to show them."""


@pytest.mark.parametrize(("name", "told"), EVIL.items())
async def test_names_are_shown_as_they_are_and_never_act_on_the_terminal(
    capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    async with served() as stage:
        stage.fleet.add(name, model=name, address=name, warnings=(name,), engine_version=name)
        out = await listed(stage, capsys)
        row, warning = out.splitlines()[1:]
        assert row.startswith(f"{told}/0 ")
        assert row.count(told) == 4
        assert warning == f"{told}/0: {told}"
        shown = await explained(stage, capsys, tokens="1,2,3")
        assert f"{told}/0 " in shown
        refused = await explained(stage, capsys, tokens="1,2,3", model=f"no {name}")
        for text in (out, shown, refused):
            assert all(one.isprintable() or one == "\n" for one in text)


@pytest.mark.parametrize(("text", "told"), CONTROL.items())
async def test_warnings_and_errors_never_act_on_the_terminal(
    capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    async with served() as stage:
        stage.fleet.add("w0", warnings=(text,))
        out = await listed(stage, capsys)
        row, warning = out.splitlines()[1:]
        assert row.startswith("w0/0 ")
        assert warning == f"w0/0: {told}"
        refused = await explained(stage, capsys, tokens="1,2,3", model=f"no {text}")
        for shown in (out, refused):
            assert all(one.isprintable() or one == "\n" for one in shown)


async def test_passwords_in_addresses_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as stage:
        url = "http://user:secret@w0:8000"
        stage.fleet.add("w0", address=url, warnings=(f"{url}/metrics: status 500",))
        out = await listed(stage, capsys)
        assert "secret" not in out
        assert out.count("http://***@w0:8000") == 2


def test_a_prefill_that_only_a_newer_router_knows_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    explanation = Explanation(worker_id="d", receipt=Receipt(policy="p", prefill="by_moonlight"))
    explanation.prefill_receipt.policy = "p"
    _print_explanation(console(WIDTH_MIN), explanation)
    assert "does not know (by_moonlight)" in capsys.readouterr().out


def test_a_file_of_tokens_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"1,2,\xff")
    with pytest.raises(click.UsageError, match="tokens: expected a text with token ids"):
        _read_tokens(f"@{file}")
