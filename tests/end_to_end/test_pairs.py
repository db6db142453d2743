"""Pairs over real sockets: what a proxy does with both halves, and what the router sees of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import pytest

from kvroute.client import Pick, UnknownSession
from kvroute.v1 import Phase, Progress, ProgressState
from tests.stage.loopback import BLOCK_SIZE, Stage, a_stage
from tests.stage.waiting import until

ROLES: Mapping[str, Any] = {"worker-0": "prefill", "worker-1": "prefill", "worker-2": "decode"}
PAIR = Phase.PHASE_PREFILL_DECODE


def prompt(first: int, tokens: int = 40 * BLOCK_SIZE + 3) -> list[int]:
    return [(first + i) % 1000 for i in range(tokens)]


async def completed(
    address: str, tokens: Sequence[int], more: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    """An engine's answer to a request of four tokens at most."""
    body = {"model": "", "prompt": list(tokens), "max_tokens": 4, **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def told(stage: Stage, pick: Pick, state: ProgressState.ValueType, **about: int) -> None:
    await stage.client.report(Progress(reservation_id=pick.reservation_id, state=state, **about))


async def proxied(stage: Stage, tokens: Sequence[int], **about: Any) -> Pick:
    """A request served as a proxy for vLLM would."""
    pick = await stage.client.route(token_ids=tokens, phase=PAIR, **about)
    more: dict[str, Any] = {}
    if (other := pick.prefill_worker) is not None:
        answer = await completed(other.address, tokens, other.prefill_body, other.headers)
        assert answer["usage"]["completion_tokens"] == 1
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        done = ProgressState.PROGRESS_STATE_PREFILL_DONE
        await told(stage, pick, done, cached_tokens=cached)
        more = other.decode_body(answer)
    answer = await completed(pick.address, tokens, more, pick.headers)
    output = answer["usage"]["completion_tokens"]
    await told(stage, pick, ProgressState.PROGRESS_STATE_FINISHED, output_tokens=output)
    return pick


async def test_a_proxy_serves_a_pair_and_the_prefix_is_found_again() -> None:
    async with a_stage(engine_count=3, roles=ROLES) as stage:
        workers = {one.worker_id: one.role for one in await stage.client.list_workers()}
        assert workers == ROLES
        pick = await proxied(stage, prompt(0), session_id="s")
        first = pick.prefill_worker
        assert first is not None
        assert ROLES[first.worker_id] == "prefill"
        assert pick.worker_id == "worker-2"
        assert pick.receipt.prefill == "remote"
        await until(
            lambda: stage.known(first.worker_id, prompt(0)) == 40 * BLOCK_SIZE,
            "what the prefill worker stored in the index",
        )
        # Another question about the same text, too long for the decode worker to compute.
        longer = [*prompt(0), *prompt(500, 400)]
        again = await stage.client.route(token_ids=longer, phase=PAIR)
        assert again.prefill_worker is not None
        assert again.prefill_worker.worker_id == first.worker_id
        assert again.prefill_worker.new_tokens == len(longer) - 40 * BLOCK_SIZE
        await stage.finish(again)
        assert not any(load.requests for load in stage.router.core.fleet.loads.values())


async def test_a_short_prompt_goes_to_the_decode_worker_alone() -> None:
    async with a_stage(engine_count=3, roles=ROLES) as stage:
        pick = await proxied(stage, prompt(0, 100))
        assert pick.prefill_worker is None
        assert pick.worker_id == "worker-2"


async def test_decode_finds_a_session_without_its_prompt() -> None:
    async with a_stage(engine_count=3, roles=ROLES) as stage:
        await proxied(stage, prompt(0), session_id="s")
        pick = await stage.client.route(session_id="s", phase=Phase.PHASE_DECODE)
        assert pick.worker_id == "worker-2"
        await stage.finish(pick)
        with pytest.raises(UnknownSession, match="'t'"):
            await stage.client.route(session_id="t", phase=Phase.PHASE_DECODE)
