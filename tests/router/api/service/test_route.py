"""Route over a real socket: every status, every answer, and nothing lost on the way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import Tier
from kvroute.v1 import router_pb2
from router.api.desk.statuses import STATUS
from router.request.prompt import Prompt
from router.request.refusal import Reason
from tests.router.api.service.setting import (
    Code,
    drained,
    full,
    gone,
    in_batch,
    nobody,
    one_worker,
    overbooked,
    sick,
    taken,
    two_models,
)
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import Served, asked, refusal, served, taken_apart


def hashed(count: int, **about: Any) -> router_pb2.RouteRequest:
    return asked(block_hashes=router_pb2.BlockHashes(hashes=range(count), **about))


STATUSES: list[tuple[str, Callable[[Fleet], None], dict[str, Any], Any, Code, str, str]] = [
    # what, the fleet, the configuration, the request, status, reason, part of the sentence
    ("no prompt", one_worker, {}, router_pb2.RouteRequest(),
     Code.INVALID_ARGUMENT, "EMPTY_PROMPT", "set token_ids, token_bytes, block_hashes or est"),
    ("an estimate of 0", one_worker, {}, asked(estimated_tokens=0),
     Code.INVALID_ARGUMENT, "EMPTY_PROMPT", "estimated_tokens is 0"),
    ("an estimate over the limit", one_worker, {"prompt_tokens_max": 99},
     asked(estimated_tokens=100),
     Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "100 tokens, the limit is 99"),
    ("an estimate too long for all", one_worker, {}, asked(estimated_tokens=10_000),
     Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "the longest context is 10000 tokens"),
    ("empty token_bytes", one_worker, {}, asked(token_bytes=b""),
     Code.INVALID_ARGUMENT, "EMPTY_PROMPT", "the prompt has no tokens"),
    ("empty token_ids", one_worker, {}, asked(token_ids=router_pb2.TokenIds()),
     Code.INVALID_ARGUMENT, "EMPTY_PROMPT", "the prompt has no tokens"),
    ("empty block_hashes", one_worker, {}, hashed(0, block_size=16),
     Code.INVALID_ARGUMENT, "EMPTY_PROMPT", "prompt_tokens"),
    ("odd token_bytes", one_worker, {}, asked(token_bytes=bytes(401)),
     Code.INVALID_ARGUMENT, "MALFORMED_PROMPT", "401 bytes long, which is no multiple of 4"),
    ("no block_size", one_worker, {}, hashed(2, prompt_tokens=32),
     Code.INVALID_ARGUMENT, "MALFORMED_PROMPT", "block_size"),
    ("too few hashes", one_worker, {}, hashed(2, block_size=16, prompt_tokens=48),
     Code.INVALID_ARGUMENT, "MALFORMED_PROMPT", "3 full blocks of 16, but block_hashes holds 2"),
    ("over the limit", one_worker, {"prompt_tokens_max": 99}, asked(100),
     Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "100 tokens, the limit is 99"),
    ("too long for all", one_worker, {}, asked(10_000),
     Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "the longest context is 10000 tokens"),
    ("unknown phase", one_worker, {}, asked(phase=99),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "unknown phase 99"),
    ("decode without a prompt", one_worker, {},
     router_pb2.RouteRequest(phase=router_pb2.PHASE_DECODE, session_id="s"),
     Code.NOT_FOUND, "UNKNOWN_SESSION", "session 's'"),
    ("long request_id", one_worker, {}, asked(request_id="x" * 1025),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "request_id is longer than 1024"),
    ("long model", one_worker, {}, asked(model="x" * 1025),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "model is longer than 1024"),
    ("many workers", one_worker, {}, asked(allowed_worker_ids=["w"] * 4097),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "allowed_worker_ids has more than 4096"),
    ("many labels", one_worker, {}, asked(required_labels={str(i): "" for i in range(4097)}),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "required_labels has more than 4096"),
    ("an item of nothing", one_worker, {}, asked(multimodal_items=[router_pb2.MultimodalItem()]),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "multimodal_items[0] has neither"),
    ("an item beyond", one_worker, {},
     asked(multimodal_items=[router_pb2.MultimodalItem(id="i", first_token=99, token_count=2)]),
     Code.INVALID_ARGUMENT, "INVALID_FIELD", "the prompt has 100"),
    ("unknown policy", one_worker, {}, asked(policy="best"),
     Code.INVALID_ARGUMENT, "UNKNOWN_POLICY", "there are dynamo-adaptive"),
    ("policy not allowed", one_worker, {"policy_per_request": False}, asked(policy="round-robin"),
     Code.PERMISSION_DENIED, "POLICY_NOT_ALLOWED", "lets no request choose a policy"),
    ("no model named", two_models, {}, asked(),
     Code.INVALID_ARGUMENT, "MODEL_REQUIRED", "alpha, beta"),
    ("unknown model", one_worker, {}, asked(model="gpt"),
     Code.NOT_FOUND, "UNKNOWN_MODEL", "unknown model 'gpt'; served here: m"),
    ("no worker yet", nobody, {}, asked(model="m"),
     Code.UNAVAILABLE, "NO_WORKER", "no worker is known yet"),
    ("none any more", gone, {}, asked(model="m"),
     Code.UNAVAILABLE, "NO_WORKER", "no worker serves 'm' at the moment"),
    ("none live", sick, {}, asked(),
     Code.UNAVAILABLE, "NO_WORKER", "(engine not answering: 1)"),
    ("none eligible", drained, {}, asked(),
     Code.UNAVAILABLE, "NO_ELIGIBLE_WORKER", "(drained: 1)"),
    ("all full", full, {}, asked(),
     Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", "(full: 1)"),
    ("shed", overbooked, {"reservations_max": 3}, asked(),
     Code.RESOURCE_EXHAUSTED, "TOO_MANY_RESERVATIONS", "3 requests are in flight"),
    ("reused id", taken, {}, asked(101, request_id="x"),
     Code.ALREADY_EXISTS, "REQUEST_ID_REUSED", "'x'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fleet", "routing", "request_", "code", "reason", "sentence"),
    [row[1:] for row in STATUSES],
    ids=[row[0] for row in STATUSES],
)
async def test_every_refusal_has_its_status_its_details_a_sentence_and_no_effect(
    fleet: Callable[[Fleet], None],
    routing: dict[str, Any],
    request_: router_pb2.RouteRequest,
    code: Code,
    reason: str,
    sentence: str,
) -> None:
    async with served(**routing) as stage:
        fleet(stage.fleet)
        before = stage.state()
        refused = await refusal(stage.router.Route(request_))
        assert (refused.code, refused.reason, refused.domain) == (code, reason, "kvroute")
        assert sentence in refused.message
        assert (refused.retry_s is not None) == (code is Code.RESOURCE_EXHAUSTED)
        assert stage.state() == before
        assert stage.requests("refused", reason) == 1

        result = await in_batch(stage, request_)
        assert taken_apart(result.status) == refused, "a batch's item is refused the same way"
        assert stage.state() == before


class TestRoute:
    async def test_an_answer_says_where_and_why_and_how_long(self) -> None:
        async with served(replica="r1") as stage:
            fleet = stage.fleet
            key = fleet.add("w0", labels={"zone": "north"})
            fleet.add("w1")
            fleet.cache(key, prompt(100), 32)
            fleet.cache(key, prompt(100), 48, Tier.DISK)
            answer = await stage.route(100)
            assert answer.worker_id == "w0"
            assert answer.address == "http://w0:8000"
            assert answer.labels == {"zone": "north"}
            assert not answer.HasField("dp_rank"), "an engine of one rank"
            assert not answer.HasField("engine_priority"), "it does not schedule by priority"
            told = answer.overlap_tokens
            assert (told.raw, told.usable) == (48, 48)
            assert (told.device, told.host, told.disk) == (32, 0, 16)
            assert answer.new_tokens == 52
            assert answer.lease_s == 120
            assert [one.worker_id for one in answer.alternatives] == ["w1"]
            receipt = answer.receipt
            assert (receipt.replica, receipt.policy) == ("r1", "dynamo-adaptive")
            assert (receipt.prompt_tokens, receipt.block_size) == (100, 16)
            assert (receipt.candidates, receipt.tied) == (2, 1)
            assert receipt.best_overlap_tokens == 48
            assert receipt.decided_at_s == fleet.now_s
            assert (receipt.picked.worker_id, receipt.runner_up.worker_id) == ("w0", "w1")
            assert stage.fleet.core.reservations.get(answer.reservation_id) is not None
            assert stage.requests("picked") == 1

    async def test_the_three_forms_of_a_prompt_are_one_prompt(self, empty: Served) -> None:
        empty.fleet.cache(empty.fleet.add("w0"), prompt(100), 64)
        tokens = pack_tokens(range(100))
        hashes = block_hashes(tokens, 16).tolist()
        for form in (
            {"token_bytes": tokens},
            {"token_ids": router_pb2.TokenIds(ids=range(100))},
            {
                "block_hashes": router_pb2.BlockHashes(
                    hashes=hashes, block_size=16, prompt_tokens=100
                )
            },
        ):
            answer = await empty.route(**form)
            assert answer.overlap_tokens.device == 64, form

    async def test_a_prompt_of_which_only_the_length_is_known_goes_by_load(
        self, empty: Served
    ) -> None:
        key = empty.fleet.add("w0")
        empty.fleet.cache(key, Prompt.from_tokens(bytes(400)), 96)
        asks = [asked(estimated_tokens=100, request_id=f"r{n}", cache_salt="s") for n in (1, 2)]
        for request in asks:
            answer = await empty.router.Route(request)
            assert answer.overlap_tokens == router_pb2.OverlapTokens()
            assert (answer.new_tokens, answer.receipt.prompt_tokens) == (100, 100)
            assert not answer.HasField("prompt")
        load = empty.fleet.core.fleet.loads[key]
        assert (load.requests, load.blocks, load.prefill_tokens) == (2, 14, 200)
        assert (await empty.router.Route(asks[1])).reservation_id == answer.reservation_id
        other = await refusal(empty.route(estimated_tokens=101, request_id="r2"))
        assert other.reason == "REQUEST_ID_REUSED"
        explained = await empty.router.Explain(asks[0])
        assert explained.receipt.prompt_tokens == 100
        assert explained.candidates[0].new_tokens == 100
        assert not empty.fleet.view.salted, "there is nothing to salt"
        (item,) = [await in_batch(empty, asked(estimated_tokens=50))]
        assert item.response.new_tokens == 50

    async def test_a_rank_is_named_where_an_engine_has_several(self, empty: Served) -> None:
        for rank in range(2):
            empty.fleet.add("w0", rank, multi_rank=True)
        answer = await empty.route()
        assert answer.HasField("dp_rank")
        (other,) = answer.alternatives
        assert {answer.dp_rank, other.dp_rank} == {0, 1}
        assert answer.receipt.picked.dp_rank == answer.dp_rank

    @pytest.mark.parametrize(
        ("direction", "priority", "expected"),
        [
            ("higher", 5, 5),
            ("lower", 5, -5),
            ("lower", -(1 << 31), (1 << 31) - 1),
            ("lower", None, 0),
        ],
    )
    async def test_priority_is_told_in_the_engines_own_direction(
        self, direction: str, priority: int | None, expected: int, empty: Served
    ) -> None:
        empty.fleet.add("w0", priority_scheduling=direction)
        answer = await empty.route(priority=priority)
        assert answer.engine_priority == expected

    async def test_a_model_that_is_a_lora_salts_the_prompt(self, empty: Served) -> None:
        key = empty.fleet.add("w0", lora_names=("ad",))
        empty.fleet.cache(key, prompt(100, lora_name="ad"), 64)
        by_model = await empty.route(model="ad")
        by_field = await empty.route(model="m", lora_name="ad")
        neither = await empty.route(model="m")
        held = [one.overlap_tokens.device for one in (by_model, by_field, neither)]
        assert held == [64, 64, 0]

    async def test_the_same_request_gets_the_same_answer(self) -> None:
        async with served("w0", "w1", "w2", "w3") as stage:
            first = await stage.route(request_id="x")
            before = stage.state()
            again = await stage.route(request_id="x")
            assert again == first
            assert stage.state() == before
            assert (stage.requests("picked"), stage.requests("repeated")) == (1, 1)

    async def test_requests_without_an_id_are_never_the_same(self, stage: Served) -> None:
        ids = [(await stage.route()).reservation_id for _ in range(3)]
        assert len(set(ids)) == 3

    async def test_all_fields_may_come_at_their_bounds(self, stage: Served) -> None:
        answer = await stage.route(
            1,
            request_id="é" * 1024,
            tenant="t" * 1024,
            session_id="s" * 1024,
            cache_salt="c" * 1024,
            priority=(1 << 31) - 1,
            expected_output_tokens=(1 << 32) - 1,
            ttft_slo_ms=(1 << 32) - 1,
            queue_timeout_ms=(1 << 32) - 1,
            excluded_worker_ids=["w"] * 4096,
        )
        assert answer.worker_id == "w0"

    async def test_a_long_sentence_does_not_take_its_status_with_it(self, stage: Served) -> None:
        # Percent-encoded, 1024 characters of 4 bytes are 12 KiB: more than trailers may have.
        odd = "\U0001f600" * 1024
        await stage.route(request_id=odd)
        refused = await refusal(stage.route(101, request_id=odd))
        assert (refused.code, refused.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_REUSED")
        assert refused.message.endswith("…")
        refused = await refusal(stage.route(model=odd))
        assert (refused.code, refused.reason) == (Code.NOT_FOUND, "UNKNOWN_MODEL")

    async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(
        self, stage: Served
    ) -> None:
        refused = await refusal(stage.route(4_000_000))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert refused.retry_s is None
        assert (await stage.route(200_000)).worker_id == "w0"

    async def test_a_fault_of_ours_ends_one_request_and_reserves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: Served
    ) -> None:
        broken = SimpleNamespace(answer=lambda *_: 1 / 0)
        monkeypatch.setattr(stage.desk, "_writer", broken)
        refused = await refusal(stage.route(request_id="x"))
        assert (refused.code, refused.reason) == (Code.INTERNAL, "INTERNAL")
        assert "ZeroDivisionError" in caplog.text
        assert "ZeroDivisionError" not in refused.message
        assert stage.fleet.loads() == {}
        assert stage.requests("refused", "INTERNAL") == 1
        monkeypatch.undo()
        assert (await stage.route(request_id="x")).worker_id == "w0"


def test_every_reason_has_a_status() -> None:
    assert set(STATUS) == set(Reason)
