"""What an operator relies on, through each gateway and by each way from it to the engines."""

import base64
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.cluster.load import Load
from tests.cluster.node import until
from tests.gateways.gateways import Way
from tests.gateways.stage import Stage

LONG_S = 70
LONG_TOKENS = 10_000
"""An answer of more than LONG_S: the simulated engine takes 8 ms for a token, or longer."""
RATE = 3
"""Chats a second by each way."""
COUNTERS = {True: "kvroute_picker_requests_total", False: "kvroute_gateway_requests_total"}
"""By whether the picker counts, or kvroute's own gateway."""


def test_a_prompt_of_3_mb_is_answered(stage: Stage) -> None:
    image = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(2_250_000)).decode()
    content = [
        {"type": "text", "text": "word " * 9000},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    for way in stage.gateway.ways:
        status, answer = stage.chat(way, content, 4)
        assert (status, "choices" in answer) == (200, True), f"{way.name}: {status} {answer[:300]}"


def test_a_client_that_leaves_is_counted_as_cancelled(stage: Stage) -> None:
    for way in stage.gateway.ways:
        counter = COUNTERS[way.picker]
        before = stage.release.count(counter, outcome="cancelled")
        _, answer = stage.chat(way, "Tell a long story", LONG_TOKENS, stream=True, leave_s=3)
        assert "data: " in answer
        until(
            lambda c=counter, b=before: stage.release.count(c, outcome="cancelled") == b + 1,
            20,
            f"{way.name}: a cancelled request",
        )


@contextmanager
def _loads(stage: Stage, **options: int) -> Iterator[dict[Way, Load]]:
    """A load by each way at once."""
    with ExitStack() as begun:
        yield {
            way: begun.enter_context(Load(stage.cluster, rate=RATE, **stage.client(way), **options))
            for way in stage.gateway.ways
        }


def _say(stage: Stage, what: str, loads: dict[Way, Load]) -> None:
    for way, load in loads.items():
        counts = f"{len(load.failed)} of {load.sent} failed"
        sys.stdout.write(f"{stage.gateway.name}, {way.name}: {what}: {counts}\n")


def test_a_rolling_update_fails_no_request_and_cuts_no_answer(stage: Stage) -> None:
    begun = time.monotonic()
    with _loads(stage, long_tokens=LONG_TOKENS) as loads:
        time.sleep(5)  # the long answers are under way
        stage.release.kubectl("rollout", "restart", "deployment/kvroute")
        stage.release.kubectl("rollout", "status", "deployment/kvroute", "--timeout=180s")
        time.sleep(10)  # the load goes on with the new pod
    _say(stage, f"rolling update, an answer of {LONG_TOKENS} tokens", loads)
    assert time.monotonic() - begun > LONG_S
    assert [load.failed for load in loads.values() if load.failed] == []


def test_a_router_that_is_killed(stage: Stage) -> None:
    with _loads(stage) as loads:
        time.sleep(5)
        (pod,) = stage.release.get("pods", "--selector=app.kubernetes.io/component=router")
        name = pod["metadata"]["name"]
        stage.release.kubectl("delete", "pod", name, "--grace-period=0", "--force")
        stage.release.kubectl("rollout", "status", "deployment/kvroute", "--timeout=180s")
        time.sleep(10)
    _say(stage, "router killed", loads)
    for way, load in loads.items():
        if way.fails_open:
            # What was under way through the picker is cut with it.
            assert [one for one in load.failed if not one["begun"]] == []
    with _loads(stage) as loads:
        time.sleep(10)
    assert [load.failed for load in loads.values() if load.failed] == []
