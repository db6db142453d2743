"""The times that a client wants its answer in, by its headers: the same at both ports."""

import json
from typing import Any

import pytest

from tests.stage.gateway import Worker, a_gateway, answering
from tests.stage.picker import a_picker, picked, request_body, request_headers
from tests.stage.served import Served

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
DONE = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'
FORMS = [
    ({}, None),
    ({"x-slo-ttft-ms": "250"}, 0.25),
    ({"x-llm-d-slo-ttft-ms": "1500"}, 1.5),
    ({"x-llm-d-slo-ttft-ms": "1500", "x-slo-ttft-ms": "250"}, 1.5),
    ({"x-slo-ttft-ms": "0"}, 0.0),
    ({"x-slo-ttft-ms": "4294967295"}, 4294967.295),
    ({"x-slo-ttft-ms": "4294967296"}, None),
    ({"x-slo-ttft-ms": "9" * 400}, None),
    ({"x-slo-ttft-ms": "-1"}, None),
    ({"x-slo-ttft-ms": "1.5"}, None),
    ({"x-slo-ttft-ms": "soon"}, None),
]


BETWEEN = [
    ({}, None),
    ({"x-slo-tpot-ms": "40"}, 0.04),
    ({"x-llm-d-slo-tpot-ms": "50", "x-slo-tpot-ms": "40"}, 0.05),
    ({"x-slo-tpot-ms": "4294967295", "x-slo-ttft-ms": "250"}, 4294967.295),
    ({"x-slo-tpot-ms": "0"}, None),
    ({"x-slo-tpot-ms": "4294967296"}, None),
    ({"x-slo-tpot-ms": "fast"}, None),
]


def waits_of(served: Served) -> list[Any]:
    """Wait and objective of the requests that come to the router from now on."""
    admission, seen = served.desk.admission, list[Any]()
    admit = admission.route

    def spy(request: Any, wait: Any, *rest: Any, **named: Any) -> Any:
        seen.append((wait.ttft_slo_s, request.objective))
        return admit(request, wait, *rest, **named)

    admission.route = spy  # type: ignore[method-assign]
    return seen


async def by_the_gateway(headers: dict[str, str]) -> list[Any]:
    async with a_gateway(Worker(answering(DONE))) as stage:
        waits = waits_of(stage.served)
        assert (await stage.ask(CHAT, BODY, headers=headers)).status == 200
    return waits


async def by_the_picker(headers: dict[str, str]) -> list[Any]:
    async with a_picker(Worker(answering(DONE))) as stage:
        waits = waits_of(stage.served)
        named = {name.replace("-", "_"): value for name, value in headers.items()}
        call = stage.call()
        await call.write(request_headers(CHAT, **named))
        await call.write(request_body(json.dumps(BODY).encode()))
        assert picked(await call.read())
        call.cancel()
        await stage.idle()
    return waits


@pytest.mark.parametrize("port", [by_the_gateway, by_the_picker])
@pytest.mark.parametrize(("headers", "seconds"), FORMS)
async def test_the_wanted_time_to_the_first_token_reaches_the_router(
    port: Any, headers: dict[str, str], seconds: float | None
) -> None:
    for waits_s, objective in await port(headers):
        assert waits_s == seconds
        wanted_s = None if seconds is None else max(seconds, 0.001)
        assert (objective and objective.ttft_s) == wanted_s


@pytest.mark.parametrize("port", [by_the_gateway, by_the_picker])
@pytest.mark.parametrize(("headers", "seconds"), BETWEEN)
async def test_the_wanted_time_between_tokens_reaches_the_router(
    port: Any, headers: dict[str, str], seconds: float | None
) -> None:
    (objective,) = {objective for _, objective in await port(headers)}
    assert (objective and objective.tpot_s) == seconds
