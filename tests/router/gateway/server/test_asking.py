"""What a gateway or a picker asks of its routers, and reports to them."""

from typing import Any

from prometheus_client import CollectorRegistry

from kvroute.client import KvRouteClient
from router.config.settings.request_settings import RequestSettings
from router.gateway.exchange import Exchange
from router.gateway.output_lengths import PRIOR_TOKENS, OutputLengths
from router.gateway.server.asking import Asking
from router.gateway.server.counters import ProgramCounters
from router.gateway.server.roster import Roster


class Routed:
    """A request whose end is reported to no router."""

    async def finished(self, **_: object) -> None: ...


def chat(model: str) -> Exchange:
    body = b'{"model":"m","messages":[]}'
    return Exchange(
        "/v1/chat/completions", body, {"x-name": model}, model_headers=("x-other", "x-name")
    )


async def test_answers_count_for_the_model_that_the_router_knows() -> None:
    client = KvRouteClient("127.0.0.1:1")
    counters = ProgramCounters(CollectorRegistry(), "picker")
    asking = Asking(client, Roster(client, lambda: 0.0), counters, RequestSettings())
    answered, lengths = chat("rewritten"), OutputLengths()
    routed: Any = Routed()
    answered.answered(200, "application/json")
    answered.answer.feed(b'{"usage":{"prompt_tokens":9,"completion_tokens":5000}}')
    await asking.report(answered, answered.ended(), routed)
    lengths.add("", 5000)
    for model, expected in (("rewritten", lengths.mean("")), ("", PRIOR_TOKENS)):
        question = asking.question(chat(model), by_load=False)
        assert question["model"] == (model or "m")
        assert question["expected_output_tokens"] == expected
