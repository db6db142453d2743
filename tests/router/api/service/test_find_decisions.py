"""FindDecisions over real gRPC: a request's pick by each of its ids, and what became of it."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvroute.client import KvRouteClient
from kvroute.v1 import FindDecisionsRequest, PastDecision
from router.app.calls.past import show_past
from router.app.calls.questions import explain
from router.fleet.reservations.reservations import FIND_MAX
from router.request.request import CLIENT_ID_END
from tests.router.api.service.setting import Code, two_models
from tests.stage.gateway import Worker, a_gateway, answering
from tests.stage.keys import a_door, bearer, identity
from tests.stage.served import Served, asked, refusal, served

WHOLE = b'{"id":"c","choices":[{"message":{"content":"hi"}}]}'


async def found(stage: Served, wanted: str) -> list[PastDecision]:
    response = await stage.call("FindDecisions", id=wanted)
    return list(response.decisions)


async def test_a_request_is_found_by_its_id_and_its_reservations_with_what_became_of_it(
    stage: Served,
) -> None:
    answer = await stage.route(request_id="a")
    stage.fleet.now_s += 2
    (by_request,) = await found(stage, "a")
    assert by_request.answer == answer
    assert (by_request.request_id, by_request.state, by_request.age_s) == ("a", "open", 2)
    assert not by_request.HasField("cached_tokens")
    await stage.report(answer.reservation_id, output_tokens=7, cached_tokens=16)
    (by_reservation,) = await found(stage, answer.reservation_id)
    assert by_reservation.answer == answer
    assert by_reservation.state == "finished"
    assert (by_reservation.output_tokens, by_reservation.cached_tokens) == (7, 16)
    assert await found(stage, "b") == []


async def test_all_requests_of_a_client_s_id_are_found_the_newest_first_up_to_the_bound(
    stage: Served,
) -> None:
    for number in range(FIND_MAX + 1):
        await stage.route(request_id=f"mine{CLIENT_ID_END}{number}")
        stage.fleet.now_s += 1
    await stage.route(request_id="mine2")
    names = [each.request_id for each in await found(stage, "mine")]
    assert names == [f"mine{CLIENT_ID_END}{n}" for n in range(FIND_MAX, 0, -1)]


@pytest.mark.parametrize("wanted", ["", "x" * 1025])
async def test_an_id_that_is_none_is_refused(wanted: str, empty: Served) -> None:
    refused = await refusal(empty.call("FindDecisions", id=wanted))
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_FIELD", "id")


async def test_a_key_that_sees_some_models_only_finds_no_decision(tmp_path: Path) -> None:
    async with served(door=a_door(tmp_path, identity("a", models=["alpha"]))) as stage:
        two_models(stage.fleet)
        metadata = bearer("a-token")
        answer = await stage.router.Route(asked(model="alpha"), metadata=metadata)
        message = FindDecisionsRequest(id=answer.reservation_id)
        assert (
            await refusal(stage.workers.FindDecisions(message, metadata=metadata))
        ).code is Code.PERMISSION_DENIED


@pytest.mark.parametrize("in_process", [False, True])
async def test_the_command_explains_a_request_of_the_gateway_by_its_client_s_own_id(
    in_process: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with a_gateway(Worker(answering(WHOLE)), in_process=in_process) as stage:
        headers = {"X-Request-Id": "my own id"}
        answer = await stage.ask("/v1/chat/completions", body, headers=headers)
        assert answer.headers["X-Request-Id"] == "my own id"
        target = f"127.0.0.1:{stage.served.server.port}"
        about: Any = {"timeout_s": 60.0, "as_json": False}
        assert await show_past(target, "my own id", **about) == 0
        told = capsys.readouterr().out
        assert f"my own id{CLIENT_ID_END}" in told
        assert "finished" in told
        assert "It holds." in told
        async with KvRouteClient(target) as client:
            (decision,) = await client.find_decisions("my own id")
        assert decision.answer.reservation_id in told
        assert await show_past(target, "another", **about) == 1
        assert "no pick of 'another' is remembered" in capsys.readouterr().err


def test_the_command_takes_an_id_or_a_prompt() -> None:
    result = CliRunner().invoke(explain, ["--request", "a", "--text", "hello"])
    assert result.exit_code == 2
    assert "give no prompt" in result.output


def test_the_command_says_when_no_router_answers() -> None:
    flags = ["--request", "a", "--target", "127.0.0.1:1", "--timeout", "0.5"]
    assert CliRunner().invoke(explain, flags).exit_code == 1
