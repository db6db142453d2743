"""The gRPC face over a real socket: every status, every method, and nothing lost on the way."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from math import inf, nan
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from events.plane.facts import VERSION, Control
from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import Tier, WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import fleet_pb2, router_pb2
from router.config.configurations import ModelSettings
from router.config.fleet_settings import TOMBSTONE_MAX_S
from router.config.keys import ConfigError
from router.config.serving_settings import GrpcSettings
from router.core.fast_path import ITEMS_MAX
from router.desk import codec, reports
from router.desk.reports import PROGRESS_MAX
from router.desk.statuses import STATUS
from router.metrics.of_fleet import RouterCollector
from router.metrics.of_workers import WorkerCollector
from router.policies import POLICIES
from router.request.prompt import Prompt
from router.request.refusal import Reason
from router.reservations.reservations import Ending, Reservation
from router.service import worker_feed
from router.service.server import SERVICES, caller_of, jittered, server_options
from tests.stage.fleet import START_S, Fleet, prompt
from tests.stage.served import Refused, Served, asked, refusal, served, taken_apart

Code = grpc.StatusCode


def one_worker(fleet: Fleet) -> None:
    fleet.add("w0", max_model_len=10_000)


def nobody(_: Fleet) -> None:
    pass


def two_models(fleet: Fleet) -> None:
    fleet.add("a", model="alpha")
    fleet.add("b", model="beta")


def gone(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.core.remove("w0", 3600.0, fleet.now_s)


def sick(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.say(WorkerKey("w0", 0), healthy=False)


def drained(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.core.drain("w0")


def full(fleet: Fleet) -> None:
    fleet.say(fleet.add("w0", total_slots=4), running=4)


def taken(fleet: Fleet) -> None:
    one_worker(fleet)
    fleet.route(prompt(100), request_id="x")


def overbooked(fleet: Fleet) -> None:
    one_worker(fleet)
    for _ in range(3):
        fleet.route(prompt(100))


def hashed(count: int, **about: Any) -> router_pb2.RouteRequest:
    return asked(block_hashes=router_pb2.BlockHashes(hashes=range(count), **about))


STATUSES: list[tuple[str, Callable[[Fleet], None], dict[str, Any], Any, Code, str, str]] = [
    # what, the fleet, the configuration, the request, status, reason, part of the sentence
    ("no prompt", one_worker, {}, router_pb2.RouteRequest(),
     Code.INVALID_ARGUMENT, "EMPTY_PROMPT", "set token_ids, token_bytes or block_hashes"),
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
     Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "the longest takes 10000"),
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
    ("policy not allowed", one_worker, {"policy_per_request": False}, asked(policy="random"),
     Code.PERMISSION_DENIED, "POLICY_NOT_ALLOWED", "may not choose a policy"),
    ("no model named", two_models, {}, asked(),
     Code.INVALID_ARGUMENT, "MODEL_REQUIRED", "alpha, beta"),
    ("unknown model", one_worker, {}, asked(model="gpt"),
     Code.NOT_FOUND, "UNKNOWN_MODEL", "unknown model 'gpt'; served here: m"),
    ("no worker yet", nobody, {}, asked(model="m"),
     Code.UNAVAILABLE, "NO_WORKER", "no worker is known yet"),
    ("none any more", gone, {}, asked(model="m"),
     Code.UNAVAILABLE, "NO_WORKER", "no worker serves 'm' at the moment"),
    ("none live", sick, {}, asked(),
     Code.UNAVAILABLE, "NO_WORKER", "1 engine not answering"),
    ("none eligible", drained, {}, asked(),
     Code.UNAVAILABLE, "NO_ELIGIBLE_WORKER", "1 drained"),
    ("all full", full, {}, asked(),
     Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", "1 full"),
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


async def in_batch(stage: Served, request: router_pb2.RouteRequest) -> router_pb2.RouteResult:
    (result,) = await batch(stage, router_pb2.RouteItem(index=7, request=request))
    assert result.index == 7
    return result


async def batch(stage: Served, *items: router_pb2.RouteItem) -> list[router_pb2.RouteResult]:
    call = stage.router.RouteStream()
    await call.write(router_pb2.RouteBatch(items=items))
    await call.done_writing()
    results = [result async for answer in call for result in answer.results]
    assert await call.code() is Code.OK
    return results


class TestRoute:
    async def test_an_answer_says_where_and_why_and_how_long(self) -> None:
        async with served(replica="r1") as stage:
            fleet = stage.fleet
            key = fleet.add("w0", labels={"zone": "north"})
            fleet.add("w1")
            fleet.cache(key, prompt(100), 32)
            fleet.cache(key, prompt(100), 48, Tier.DISK)
            answer = await stage.router.Route(asked(100))
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

    async def test_the_three_forms_of_a_prompt_are_one_prompt(self) -> None:
        async with served() as stage:
            stage.fleet.cache(stage.fleet.add("w0"), prompt(100), 64)
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
                answer = await stage.router.Route(asked(**form))
                assert answer.overlap_tokens.device == 64, form

    async def test_a_rank_is_named_where_an_engine_has_several(self) -> None:
        async with served() as stage:
            for rank in range(2):
                stage.fleet.add("w0", rank, multi_rank=True)
            answer = await stage.router.Route(asked())
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
        self, direction: str, priority: int | None, expected: int
    ) -> None:
        async with served() as stage:
            stage.fleet.add("w0", priority_scheduling=direction)
            answer = await stage.router.Route(asked(priority=priority))
            assert answer.engine_priority == expected

    async def test_a_model_that_is_a_lora_salts_the_prompt(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0", lora_names=("ad",))
            stage.fleet.cache(key, prompt(100, lora_name="ad"), 64)
            by_model = await stage.router.Route(asked(model="ad"))
            by_field = await stage.router.Route(asked(model="m", lora_name="ad"))
            neither = await stage.router.Route(asked(model="m"))
            held = [one.overlap_tokens.device for one in (by_model, by_field, neither)]
            assert held == [64, 64, 0]

    async def test_the_same_request_gets_the_same_answer(self) -> None:
        async with served() as stage:
            for i in range(4):
                stage.fleet.add(f"w{i}")
            first = await stage.router.Route(asked(request_id="x"))
            before = stage.state()
            again = await stage.router.Route(asked(request_id="x"))
            assert again == first
            assert stage.state() == before
            assert (stage.requests("picked"), stage.requests("repeated")) == (1, 1)

    async def test_requests_without_an_id_are_never_the_same(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            ids = [(await stage.router.Route(asked())).reservation_id for _ in range(3)]
            assert len(set(ids)) == 3

    async def test_all_fields_may_come_at_their_bounds(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            answer = await stage.router.Route(
                asked(
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
            )
            assert answer.worker_id == "w0"

    async def test_a_long_sentence_does_not_take_its_status_with_it(self) -> None:
        # Percent-encoded, 1024 characters of 4 bytes are 12 KiB: more than trailers may have.
        async with served() as stage:
            stage.fleet.add("w0")
            odd = "\U0001f600" * 1024
            await stage.router.Route(asked(request_id=odd))
            refused = await refusal(stage.router.Route(asked(101, request_id=odd)))
            assert (refused.code, refused.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_REUSED")
            assert refused.message.endswith("…")
            refused = await refusal(stage.router.Route(asked(model=odd)))
            assert (refused.code, refused.reason) == (Code.NOT_FOUND, "UNKNOWN_MODEL")

    async def test_a_message_over_the_limit_is_grpcs_own_refusal(self) -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", max_message_mib=1)
        async with served(settings) as stage:
            stage.fleet.add("w0")
            refused = await refusal(stage.router.Route(asked(300_000)))
            assert refused == Refused(Code.RESOURCE_EXHAUSTED, "", "", refused.message, None)
            assert (await stage.router.Route(asked(200_000))).worker_id == "w0"

    async def test_a_fault_of_ours_ends_one_request_and_reserves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            monkeypatch.setattr(codec, "write_pick", lambda *_: 1 / 0)
            refused = await refusal(stage.router.Route(asked(request_id="x")))
            assert (refused.code, refused.reason) == (Code.INTERNAL, "INTERNAL")
            assert "ZeroDivisionError" in caplog.text
            assert "ZeroDivisionError" not in refused.message
            assert stage.fleet.loads() == {}
            assert stage.requests("refused", "INTERNAL") == 1
            monkeypatch.undo()
            assert (await stage.router.Route(asked(request_id="x"))).worker_id == "w0"


def number(value: int, total: bool) -> float:
    """A total that a row carries only when it is known."""
    return float(value) if total else nan


def by_hand(policy: str, receipt: router_pb2.Receipt, row: router_pb2.CandidateRow) -> float:
    """A row's cost, from the numbers of its receipt and nothing else."""
    constants = receipt.parameters
    blocks = number(row.total_blocks, row.HasField("total_blocks"))
    slots = number(row.total_slots, row.HasField("total_slots"))
    load = row.active_blocks / blocks if blocks > 0 else 0.0
    queue = row.running + row.waiting + row.reserved
    match policy:
        case "dynamo-adaptive" | "dynamo-unguarded":
            mean, std = receipt.terms["load_mean"], receipt.terms["load_std"]
            uneven = mean > 0 and std > constants["balance_threshold"] * mean
            alpha = constants["alpha_balance"] if uneven else constants["alpha_cache"]
            slot_ratio = queue / slots if slots > 0 else 0.0
            new_share = row.new_tokens / receipt.prompt_tokens
            return alpha * (load - mean) + (1 - alpha) * new_share + constants["gamma"] * slot_ratio
        case "dynamo-logit":
            longest = receipt.terms["waiting_max"]
            waiting = max(0.0, row.waiting + row.reserved)
            overlap = receipt.prompt_tokens - row.new_tokens
            return -(
                constants["overlap_weight"] * overlap / receipt.prompt_tokens
                - load
                - (waiting / longest if longest > 0 else 0.0)
            )
        case "dynamo-blocks":
            size = row.terms["block_size"]
            raw = (row.prefill_tokens_active + receipt.prompt_tokens) / size
            overlap = row.overlap_tokens
            on_device = overlap.device + overlap.predicted
            credit = row.trust * (on_device + 0.75 * overlap.host + 0.25 * overlap.disk) / size
            blocks = row.active_blocks + row.terms["new_blocks"]
            return constants["prefill_load_scale"] * max(raw - credit, 0) + blocks
        case "ttft":
            terms = row.terms
            twice = constants["keep"] * terms["evicted_share"]
            seconds = terms["wait_s"] + terms["load_s"] + (1 + twice) * terms["prefill_s"]
            seconds += terms["room_s"]
            seconds += constants["crowding"] * terms["crowded_s"]
            return seconds + constants["stall"] * queue * terms["prefill_s"] + load
        case "conductor":
            waiting = max(0.0, row.waiting + row.reserved)
            near = 0.7 * row.terms["distance"] + 0.3 * waiting
            stage = int(row.terms["stage"])
            return 1e6 * stage + (waiting, near, queue + load / (1 + load))[stage]
        case "prefill-queue":
            return row.prefill_tokens_active + row.new_tokens
        case "decode-room":
            terms = row.terms
            share = (row.active_blocks + terms["need_blocks"]) / blocks if blocks > 0 else 0.0
            batch = queue / (slots if slots > 0 else constants["slots_unknown"])
            way = (1 + terms["kv_distance"]) / 4 * row.new_tokens / receipt.prompt_tokens
            no_room = blocks > 0 and terms["need_blocks"] > blocks - row.active_blocks
            return share + batch + constants["way_weight"] * way + 1000 * no_room
        case "session-sticky":
            return row.terms["distance"] + (queue + 1 > receipt.terms["share"])
        case "power-of-two":
            return queue
        case "least-loaded":
            return queue + load / (1 + load)
        case "round-robin":
            return row.terms["last_picked"]
        case "random":
            return 0.0
        case _:
            pytest.fail(f"{policy} has no formula here")


class TestReceipts:
    def uneven(self, fleet: Fleet) -> None:
        """Five workers that differ in everything a cost may look at."""
        rng = np.random.default_rng(5)
        for i in range(5):
            unknown = i == 3
            key = fleet.add(
                f"w{i}",
                block_size=(16, 32)[i % 2],
                total_blocks=None if unknown else 500 + 100 * i,
                total_slots=None if i == 4 else 20 + i,
            )
            fleet.cache(key, prompt(500), 64 * i)
            fleet.turn(1)
            for _ in range(i):
                fleet.route(prompt(50 + i), allowed_workers=frozenset({f"w{i}"}))
            fleet.say(
                key,
                running=int(rng.integers(9)),
                waiting=int(rng.integers(5)),
                used_blocks=float(rng.integers(300)),
                sampled_at_s=fleet.now_s - 0.5,
            )
        fleet.tell(WorkerKey("w4", 0), lost=True)
        fleet.beat(WorkerKey("w4", 0))  # recovering: half of its overlap counts

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    async def test_a_cost_recomputed_by_hand_is_the_cost_and_leads_to_the_pick(
        self, policy: str
    ) -> None:
        async with served() as stage:
            self.uneven(stage.fleet)
            explained = await stage.router.Explain(asked(510, policy=policy))
            answer = await stage.router.Route(asked(510, policy=policy))
            receipt = answer.receipt
            for row in (receipt.picked, receipt.runner_up):
                assert by_hand(policy, receipt, row) == pytest.approx(row.cost, abs=1e-12)
            drawn = "chance" in receipt.picked.terms
            assert receipt.picked.cost <= receipt.runner_up.cost or drawn
            assert answer.worker_id == receipt.picked.worker_id
            costs = {
                row.worker_id: by_hand(policy, explained.receipt, row)
                for row in explained.candidates
            }
            assert len(costs) == 5
            cheapest = min(costs.values())
            assert costs[answer.worker_id] == pytest.approx(cheapest, abs=1e-12) or drawn
            tied = [cost for cost in costs.values() if cost == pytest.approx(cheapest, abs=1e-12)]
            assert receipt.tied == len(tied)

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    async def test_the_formula_is_arithmetic_over_names_that_the_receipt_explains(
        self, policy: str
    ) -> None:
        async with served() as stage:
            self.uneven(stage.fleet)
            receipt = (await stage.router.Route(asked(510, policy=policy))).receipt
            for row in (receipt.picked, receipt.runner_up):
                names = {**receipt.parameters, **receipt.terms, **row.terms}
                expression = compile(receipt.formula.split(";")[0], "formula", "eval")
                assert eval(expression, {}, names) == pytest.approx(row.cost, abs=1e-12)

    async def test_terms_common_to_all_are_recomputed_from_the_explained_rows(self) -> None:
        async with served() as stage:
            self.uneven(stage.fleet)
            explained = await stage.router.Explain(asked(510, policy="dynamo-adaptive"))
            loads = [
                row.active_blocks / row.total_blocks if row.total_blocks else 0.0
                for row in explained.candidates
            ]
            terms = explained.receipt.terms
            assert terms["load_mean"] == pytest.approx(sum(loads) / 5)
            assert terms["load_std"] == pytest.approx(np.std(loads))
            explained = await stage.router.Explain(asked(510, policy="dynamo-logit"))
            queues = [max(0.0, row.waiting + row.reserved) for row in explained.candidates]
            assert explained.receipt.terms["waiting_max"] == max(queues)

    async def test_a_row_says_what_its_overlap_is_worth(self) -> None:
        async with served() as stage:
            self.uneven(stage.fleet)
            rows = (await stage.router.Explain(asked(510))).candidates
            for row in rows:
                usable = row.overlap_tokens.usable
                assert row.new_tokens == 510 - row.trust * usable
            recovering = next(row for row in rows if row.worker_id == "w4")
            assert (recovering.trust, recovering.stream_state) == (0.5, "recovering")
            ages = {row.worker_id: row.sample_age_s for row in rows}
            assert ages == dict.fromkeys(("w0", "w1", "w2", "w3"), 0.0) | {"w4": 0.5}

    async def test_exclusions_are_counted_by_reason(self) -> None:
        async with served() as stage:
            fleet = stage.fleet
            for i in range(4):
                fleet.add(f"w{i}")
            fleet.core.drain("w0")
            fleet.say(WorkerKey("w1", 0), healthy=False)
            fleet.say(WorkerKey("w2", 0), running=1000)
            receipt = (await stage.router.Route(asked())).receipt
            assert receipt.excluded == {"drained": 1, "engine not answering": 1, "full": 1}
            assert receipt.candidates == 4
            assert receipt.tied == 1
            assert not receipt.HasField("runner_up")


class TestExplain:
    async def test_it_reserves_nothing_and_says_who_would_be_picked(self) -> None:
        async with served() as stage:
            fleet = stage.fleet
            for i in range(3):
                fleet.cache(fleet.add(f"w{i}"), prompt(100), 32 * i)
            before = stage.state()
            for _ in range(3):
                explained = await stage.router.Explain(asked(100, request_id="x"))
                assert explained.worker_id == "w2"
            assert stage.state() == before
            assert [row.worker_id for row in explained.candidates] == ["w2", "w1", "w0"]
            assert not explained.HasField("refusal")
            assert stage.requests("explained") == 3
            assert (await stage.router.Route(asked(100, request_id="x"))).worker_id == "w2"

    async def test_excluded_workers_come_last_with_their_reasons(self) -> None:
        async with served() as stage:
            fleet = stage.fleet
            for name in ("drained", "full", "sick", "well"):
                fleet.add(name, total_slots=5)
            fleet.core.drain("drained")
            fleet.say(WorkerKey("full", 0), running=5)
            fleet.say(WorkerKey("sick", 0), healthy=False)
            explained = await stage.router.Explain(asked())
            rows = [(row.worker_id, row.excluded) for row in explained.candidates]
            assert rows[0] == ("well", "")
            assert dict(rows[1:]) == {
                "drained": "drained",
                "full": "full",
                "sick": "engine not answering",
            }

    async def test_when_nobody_can_be_picked_it_says_what_route_would_have_answered(self) -> None:
        async with served() as stage:
            full(stage.fleet)
            explained = await stage.router.Explain(asked())
            assert explained.worker_id == ""
            refused = await refusal(stage.router.Route(asked()))
            assert taken_apart(explained.refusal) == refused
            assert refused.reason == "ALL_WORKERS_FULL"
            assert [row.excluded for row in explained.candidates] == ["full"]

    async def test_a_pool_without_live_workers_is_explained_too(self) -> None:
        async with served() as stage:
            sick(stage.fleet)
            explained = await stage.router.Explain(asked())
            assert taken_apart(explained.refusal).reason == "NO_WORKER"
            (row,) = explained.candidates
            assert (row.worker_id, row.excluded) == ("w0", "engine not answering")
            assert explained.receipt.candidates == 1

    async def test_a_request_that_is_none_is_refused(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            refused = await refusal(stage.router.Explain(router_pb2.RouteRequest()))
            assert refused.reason == "EMPTY_PROMPT"


class TestRouteStream:
    async def test_results_come_by_index_good_and_bad_mixed(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            items = [
                router_pb2.RouteItem(index=900 + i, request=asked(0 if i % 3 == 0 else 40))
                for i in range(50)
            ]
            results = {one.index: one for one in await batch(stage, *items)}
            assert set(results) == {900 + i for i in range(50)}
            for i in range(50):
                which = results[900 + i].WhichOneof("result")
                assert which == ("status" if i % 3 == 0 else "response")
            assert len(stage.fleet.core.reservations) == 33

    async def test_batches_follow_one_another_on_one_call(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            call = stage.router.RouteStream()
            for i in range(5):
                item = router_pb2.RouteItem(index=i, request=asked())
                await call.write(router_pb2.RouteBatch(items=[item]))
                answer = await call.read()
                assert [one.index for one in answer.results] == [i]
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

    async def test_an_item_without_a_request_is_told_so(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            empty, good = await batch(
                stage,
                router_pb2.RouteItem(index=1),
                router_pb2.RouteItem(index=2, cancel=True),
                router_pb2.RouteItem(index=3, request=asked()),
            )
            assert (empty.index, taken_apart(empty.status).reason) == (1, "INVALID_FIELD")
            assert (good.index, good.response.worker_id) == (3, "w0")

    async def test_a_batch_too_big_ends_the_call_and_reserves_nothing(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            call = stage.router.RouteStream()
            items = [router_pb2.RouteItem(index=i) for i in range(ITEMS_MAX + 1)]
            items[0].request.CopyFrom(asked())
            await call.write(router_pb2.RouteBatch(items=items))
            refused = await refusal(call.read())
            assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert f"{ITEMS_MAX} is the most" in refused.message
            assert stage.fleet.loads() == {}

    async def test_a_fault_of_ours_ends_one_item(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            write_pick = codec.write_pick

            def breaks(answer: Any, pick: Any, core: Any, priority: int) -> None:
                write_pick(answer, pick, core, priority)
                if pick.reservation.request_id == "bad":
                    raise ValueError("broken")

            monkeypatch.setattr(codec, "write_pick", breaks)
            bad, good = await batch(
                stage,
                router_pb2.RouteItem(index=1, request=asked(request_id="bad")),
                router_pb2.RouteItem(index=2, request=asked(request_id="good")),
            )
            assert taken_apart(bad.status).code is Code.INTERNAL
            assert good.response.worker_id == "w0"
            assert len(stage.fleet.core.reservations) == 1

    async def test_items_with_one_index_are_each_counted_with_their_own_prompt(self) -> None:
        counted: list[tuple[int, bytes | None]] = []

        class Hot:
            def on_pick(
                self, one: Reservation, _: bool, prompt: Callable[[], Prompt], now_s: float
            ) -> None:
                counted.append((one.prompt_tokens, prompt().leading_tokens(16)))

        async with served(index=NativeIndex()) as stage:
            stage.fleet.add("w0")
            stage.fleet.core.hot = Hot()  # type: ignore[assignment]  # the part of it that is called
            requests = [asked(32, first=1000), asked(48, first=2000), asked(64, first=3000)]
            items = [router_pb2.RouteItem(index=7, request=one) for one in requests]
            results = await batch(stage, *items)
            assert [one.index for one in results] == [7, 7, 7]
        assert counted == [
            (32, pack_tokens(range(1000, 1016))),
            (48, pack_tokens(range(2000, 2016))),
            (64, pack_tokens(range(3000, 3016))),
        ]

    async def test_it_ends_when_the_server_drains(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            call = stage.router.RouteStream()
            item = router_pb2.RouteItem(index=1, request=asked())
            await call.write(router_pb2.RouteBatch(items=[item]))
            await call.read()
            stage.stopping.set()
            async with asyncio.timeout(10):
                assert await call.read() is grpc.aio.EOF
                await stage.server.drain(60)

    async def test_calls_under_way_when_the_server_drains_are_answered_or_unavailable(self) -> None:
        answered, ends = 0, list[Code]()
        flows = asyncio.Event()

        async def call_until_refused(stage: Served) -> None:
            nonlocal answered
            while not ends:
                try:
                    await stage.router.Explain(asked())
                except grpc.aio.AioRpcError as error:
                    ends.append(error.code())
                answered += 1
                if answered == 100:
                    flows.set()

        async with served() as stage, asyncio.timeout(30):
            stage.fleet.add("w0")
            callers = [asyncio.create_task(call_until_refused(stage)) for _ in range(16)]
            await flows.wait()
            await stage.server.drain(10)
            await asyncio.gather(*callers)
        assert set(ends) == {Code.UNAVAILABLE}

    async def test_a_client_that_leaves_leaves_no_task_behind(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            before = tasks()
            call = stage.router.RouteStream()
            item = router_pb2.RouteItem(index=1, request=asked())
            await call.write(router_pb2.RouteBatch(items=[item]))
            await call.read()
            assert tasks() - before
            call.cancel()
            async with asyncio.timeout(10):
                while left := tasks() - before:
                    await asyncio.wait(left, timeout=0.01)

    async def test_a_client_learns_at_once_that_streams_get_through(self) -> None:
        async with served() as stage, asyncio.timeout(10):
            call = stage.router.RouteStream()
            await call.initial_metadata()
            assert not call.done()
            call.cancel()

    async def test_a_cancel_after_the_answer_leaves_nothing_reserved(self) -> None:
        async with served() as stage, asyncio.timeout(10):
            stage.fleet.add("w0")
            call = stage.router.RouteStream()
            items = [router_pb2.RouteItem(index=i, request=asked(first=i)) for i in range(2)]
            await call.write(router_pb2.RouteBatch(items=items))
            answers: dict[int, router_pb2.RouteResponse] = {}
            while len(answers) < 2:  # in one message or two
                answers |= {one.index: one.response for one in (await call.read()).results}
            kept = answers[0].reservation_id
            cancel = router_pb2.RouteItem(index=1, cancel=True)
            await call.write(router_pb2.RouteBatch(items=[cancel]))
            assert not (await call.read()).results
            assert [one.id for one in stage.fleet.core.reservations._open.values()] == [kept]
            assert stage.fleet.core.endings == {Ending.FAILED_CANCELLED: 1}
            call.cancel()

    async def test_no_connection_s_age_ever_breaks_a_stream(self) -> None:
        settings = GrpcSettings(
            listen="127.0.0.1:0", max_connection_age_s=0.1, max_connection_age_grace_s=1.0
        )  # a stream ends by itself 0.2 s before the grace: enough on a busy machine
        async with served(settings) as stage, asyncio.timeout(20):
            stage.fleet.add("w0")
            written = answered = streams = 0
            while streams < 3:
                streams += 1
                call = stage.router.RouteStream()
                while True:
                    item = router_pb2.RouteItem(index=written, request=asked())
                    try:
                        await call.write(router_pb2.RouteBatch(items=[item]))
                    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                        break  # it ended since we read; to a write, gRPC doesn't tell how
                    written += 1
                    if (answer := await call.read()) is grpc.aio.EOF:
                        assert await call.code() is Code.OK
                        break
                    answered += len(answer.results)
            assert written - answered <= streams, "only what was on the way is left"


def tasks() -> set[asyncio.Task[Any]]:
    """All tasks but those in which gRPC waits for the next call."""
    return {task for task in asyncio.all_tasks() if "AioServer" not in repr(task)}


class TestReport:
    async def outcomes(self, stage: Served, *steps: dict[str, Any]) -> list[int]:
        progress = [router_pb2.Progress(**step) for step in steps]
        answer = await stage.router.Report(router_pb2.ReportRequest(progress=progress))
        assert [one.reservation_id for one in answer.outcomes] == [
            one.reservation_id for one in progress
        ]
        return [one.result for one in answer.outcomes]

    async def test_a_life_from_pick_to_end(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            pick = await stage.router.Route(asked(100))
            held = pick.reservation_id
            assert stage.fleet.loads() == {key: (1, 7, 100)}
            results = await self.outcomes(
                stage,
                {"reservation_id": held, "state": router_pb2.PROGRESS_STATE_RUNNING},
                {"reservation_id": held, "state": router_pb2.PROGRESS_STATE_PREFILL_DONE},
                {"reservation_id": held, "state": router_pb2.PROGRESS_STATE_PREFILL_DONE},
            )
            assert results == [
                router_pb2.PROGRESS_RESULT_APPLIED,
                router_pb2.PROGRESS_RESULT_APPLIED,
                router_pb2.PROGRESS_RESULT_UNCHANGED,
            ]
            assert stage.fleet.loads() == {key: (1, 7, 0)}
            end = {
                "reservation_id": held,
                "state": router_pb2.PROGRESS_STATE_FINISHED,
                "output_tokens": 5,
                "cached_tokens": 64,
            }
            assert await self.outcomes(stage, end, end) == [
                router_pb2.PROGRESS_RESULT_APPLIED,
                router_pb2.PROGRESS_RESULT_UNCHANGED,
            ]
            assert stage.fleet.loads() == {}
            registry = stage.metrics.registry
            assert registry.get_sample_value("kvroute_cached_tokens_reported_total") == 64

    async def test_a_long_report_lets_others_have_a_turn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reports, "SLICE_S", 0.0)
        async with served() as stage:
            stage.fleet.add("w0")
            seen: list[int] = []
            real = stage.fleet.core.report
            monkeypatch.setattr(
                stage.fleet.core, "report", lambda *step: (seen.append(turns), real(*step))[1]
            )
            turns = 0

            async def others() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            ticker = asyncio.create_task(others())
            step = {"reservation_id": "r", "state": router_pb2.PROGRESS_STATE_RUNNING}
            await self.outcomes(stage, *[step] * 20)
            ticker.cancel()
            assert len(seen) == len(set(seen)) == 20

    async def test_each_step_has_its_own_outcome_in_order(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            held = (await stage.router.Route(asked())).reservation_id
            progress = [
                router_pb2.Progress(
                    reservation_id="elsewhere-1", state=router_pb2.PROGRESS_STATE_FINISHED
                ),
                router_pb2.Progress(reservation_id=held),
                router_pb2.Progress(reservation_id=held, state=77),  # type: ignore[arg-type]
                router_pb2.Progress(
                    reservation_id=held,
                    state=router_pb2.PROGRESS_STATE_FAILED,
                    failure_reason=9,  # type: ignore[arg-type]
                ),
                router_pb2.Progress(
                    reservation_id=held,
                    state=router_pb2.PROGRESS_STATE_FAILED,
                    failure_reason=router_pb2.FAILURE_REASON_WORKER,
                ),
            ]
            answer = await stage.router.Report(router_pb2.ReportRequest(progress=progress))
            assert [(one.result, one.message) for one in answer.outcomes] == [
                (router_pb2.PROGRESS_RESULT_UNKNOWN, ""),
                (router_pb2.PROGRESS_RESULT_INVALID, "unknown state 0"),
                (router_pb2.PROGRESS_RESULT_INVALID, "unknown state 77"),
                (router_pb2.PROGRESS_RESULT_INVALID, "unknown failure_reason 9"),
                (router_pb2.PROGRESS_RESULT_APPLIED, ""),
            ]
            assert stage.fleet.core.endings == {"failed_worker": 1}

    async def test_ids_that_a_caller_counts_up_are_of_nobody(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            for _ in range(3):
                await stage.router.Route(asked())
            guesses = [f"{stage.fleet.core.replica}-{number}" for number in range(100)]
            answer = await stage.router.Report(
                router_pb2.ReportRequest(
                    progress=[
                        router_pb2.Progress(
                            reservation_id=one, state=router_pb2.PROGRESS_STATE_FINISHED
                        )
                        for one in guesses
                    ]
                )
            )
            unknown = router_pb2.PROGRESS_RESULT_UNKNOWN
            assert [one.result for one in answer.outcomes] == [unknown] * 100
            assert len(stage.fleet.core.reservations) == 3

    async def test_an_id_has_a_bound_in_characters(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            at_bound, over = "a" * (codec.TEXT_MAX - 2) + "-1", "a" * (codec.TEXT_MAX - 1) + "-1"
            answer = await stage.router.Report(
                router_pb2.ReportRequest(
                    progress=[
                        router_pb2.Progress(
                            reservation_id=one, state=router_pb2.PROGRESS_STATE_FINISHED
                        )
                        for one in (at_bound, over)
                    ]
                )
            )
            assert [(one.result, one.message) for one in answer.outcomes] == [
                (router_pb2.PROGRESS_RESULT_UNKNOWN, ""),
                (
                    router_pb2.PROGRESS_RESULT_INVALID,
                    "reservation_id is longer than 1024 characters",
                ),
            ]

    async def test_every_reason_of_failure_is_told_apart(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            for reason in router_pb2.FailureReason.values():
                held = (await stage.router.Route(asked())).reservation_id
                await self.outcomes(
                    stage,
                    {
                        "reservation_id": held,
                        "state": router_pb2.PROGRESS_STATE_FAILED,
                        "failure_reason": reason,
                    },
                )
            assert set(stage.fleet.core.endings) == {
                "failed_unknown",
                "failed_worker",
                "failed_timeout",
                "failed_client",
                "failed_cancelled",
            }

    async def test_cached_tokens_of_zero_are_a_report_and_absent_ones_are_none(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            stage.fleet.cache(key, prompt(100), 64)
            state = router_pb2.PROGRESS_STATE_FINISHED
            for told in ({}, {"cached_tokens": 0}):
                held = (await stage.router.Route(asked(100))).reservation_id
                await self.outcomes(stage, {"reservation_id": held, "state": state, **told})
            known = stage.fleet.core.fleet.cache_reports[key]
            assert (known.predicted, known.reported) == (64, 0)

    async def test_a_refused_connection_ejects_its_worker_and_shows(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            stage.fleet.add("w1")
            pick = await stage.router.Route(asked(100))
            failed = {
                "reservation_id": pick.reservation_id,
                "state": router_pb2.PROGRESS_STATE_FAILED,
                "failure_reason": router_pb2.FAILURE_REASON_WORKER,
                "refused": True,
            }
            await self.outcomes(stage, failed)
            for worker in (await stage.workers.ListWorkers(fleet_pb2.ListWorkersRequest())).workers:
                is_out = worker.worker_id == pick.worker_id
                assert worker.schedulable != is_out
                assert worker.last_resort == worker.HasField("ejection") == is_out
                if is_out:
                    assert worker.unschedulable_reason == "ejected: connections refused"
                    assert (worker.ejection.reason, worker.ejection.times) == ("refused", 1)
                    assert worker.ejection.until.ToNanoseconds() == int((START_S + 1) * 1e9)
                    assert dict(worker.outcomes) == {"failed_refused": 1}
            (standing,) = stage.fleet.core.fleet.outliers._out.values()
            assert standing.accuser == "127.0.0.1"
            receipt = (await stage.router.Route(asked(100))).receipt
            assert dict(receipt.excluded) == {"ejected: connections refused": 1}

    async def test_what_a_replica_hands_on_counts_as_its_callers_word(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            held = (await stage.router.Route(asked(100))).reservation_id
            failed = router_pb2.Progress(
                reservation_id=held,
                state=router_pb2.PROGRESS_STATE_FAILED,
                failure_reason=router_pb2.FAILURE_REASON_WORKER,
                refused=True,
            )
            handed_on = router_pb2.ReportRequest(progress=[failed], caller="10.0.0.7")
            stage.reports.of_peer(handed_on.SerializeToString())
            standing = stage.fleet.core.fleet.outliers.standing(key)
            assert standing is not None
            assert standing.accuser == "10.0.0.7"

    @pytest.mark.parametrize(
        ("peer", "caller"),
        [
            ("ipv4:10.0.0.7:52314", "10.0.0.7"),
            ("ipv6:%5Bfd00::12%5D:52314", "fd00::12"),
            ("unix:", "unix"),
            ("", ""),
        ],
    )
    def test_a_caller_is_a_host_without_its_port(self, peer: str, caller: str) -> None:
        assert caller_of(peer) == caller

    async def test_too_many_steps_are_refused(self) -> None:
        async with served() as stage:
            progress = [router_pb2.Progress()] * (PROGRESS_MAX + 1)
            call = stage.router.Report(router_pb2.ReportRequest(progress=progress))
            assert (await refusal(call)).reason == "INVALID_FIELD"

    async def test_no_steps_have_no_outcomes(self) -> None:
        async with served() as stage:
            assert await self.outcomes(stage) == []


class TestFleet:
    async def test_workers_are_listed_by_id_and_rank_with_all_that_is_known(self) -> None:
        async with served() as stage:
            fleet = stage.fleet
            key = fleet.add(
                "b",
                1,
                model="alpha",
                model_aliases=("a",),
                lora_names=("ad",),
                labels={"zone": "north"},
                engine_version="0.32.0",
                engine_block_size=4,
                max_model_len=4096,
                warnings=("an odd thing",),
            )
            fleet.add("b", 0, model="beta", total_blocks=0, total_slots=None)
            fleet.add("a")
            fleet.cache(key, prompt(64), 48)
            fleet.cache(key, prompt(64), 32, Tier.HOST)
            fleet.say(key, running=2, waiting=1, used_blocks=9.0)
            await stage.router.Route(asked(20, model="alpha"))
            fleet.now_s += 0.5
            listed = (await stage.workers.ListWorkers(fleet_pb2.ListWorkersRequest())).workers
            assert [(one.worker_id, one.dp_rank) for one in listed] == [
                ("a", 0),
                ("b", 0),
                ("b", 1),
            ]
            _, unknown, told = listed
            assert not unknown.HasField("total_blocks"), "0 is not told"
            assert not unknown.HasField("total_slots")
            assert (told.model, told.model_aliases, told.lora_names) == ("alpha", ["a"], ["ad"])
            assert (told.engine, told.engine_version) == ("vllm", "0.32.0")
            assert (told.block_size, told.engine_block_size) == (16, 4)
            assert told.max_model_len == 4096
            assert told.labels == {"zone": "north"}
            assert (told.schedulable, told.unschedulable_reason) == (True, "")
            assert (told.stream_state, told.stream_complete) == ("live", True)
            assert (told.blocks_device, told.blocks_host, told.blocks_disk) == (3, 2, 0)
            assert (told.running, told.waiting, told.reserved) == (2, 1, 1)
            assert told.active_blocks == 9 + 2
            assert (told.total_blocks, told.total_slots) == (1000, 100)
            assert told.prefill_tokens_active == 20 - 16
            assert (told.prefill_rate, told.prefills_measured) == (20_000, 0)
            assert told.beat_age_s == told.sample_age_s == 0.5
            assert told.warnings == ["an odd thing"]
            assert told.stream_changed_at.ToSeconds() == int(fleet.now_s)

    async def test_a_list_may_be_of_one_model_by_any_of_its_names(self) -> None:
        models = (ModelSettings(name="alpha", aliases=("configured",)),)
        async with served(models=models) as stage:
            stage.fleet.add("a", model="alpha", model_aliases=("told",))
            stage.fleet.add("b", model="beta", lora_names=("ad",))
            for name, expected in [
                ("alpha", ["a"]),
                ("told", ["a"]),
                ("configured", ["a"]),
                ("ad", ["b"]),
                ("none", []),
                ("", ["a", "b"]),
            ]:
                request = fleet_pb2.ListWorkersRequest(model=name)
                listed = (await stage.workers.ListWorkers(request)).workers
                assert [one.worker_id for one in listed] == expected, name

    async def test_watching_tells_all_first_and_then_what_changed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_feed, "WATCH_S", 0.01)
        async with served() as stage, asyncio.timeout(20):
            fleet = stage.fleet
            fleet.add("a")
            fleet.add("b")
            watch = stage.workers.WatchWorkers(fleet_pb2.WatchWorkersRequest())

            async def changes() -> tuple[list[str], list[str]]:
                told = await watch.read()
                return (
                    [one.worker_id for one in told.changed],
                    [one.worker_id for one in told.removed],
                )

            assert await changes() == (["a", "b"], [])
            fleet.now_s += 0.5  # ages alone are no change
            fleet.add("c")
            assert await changes() == (["c"], [])
            fleet.core.drain("b")
            assert await changes() == (["b"], [])
            fleet.core.remove("a", 60.0, fleet.now_s)
            assert await changes() == ([], ["a"])
            stage.stopping.set()
            assert await watch.read() is grpc.aio.EOF

    async def test_statuses_are_written_once_for_all_who_watch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_feed, "WATCH_S", 0.01)
        settings = GrpcSettings(listen="127.0.0.1:0", watches_max=5)
        async with served(settings) as stage, asyncio.timeout(30):
            for i in range(100):
                stage.fleet.add(f"w{i:02}", model="m" if i < 60 else "n")
            feed, request = stage.watched, fleet_pb2.WatchWorkersRequest
            calls = [stage.workers.WatchWorkers(request(model=m)) for m in ("", "", "", "m", "n")]
            first = [await call.read() for call in calls]
            assert [len(one.changed) for one in first] == [100, 100, 100, 60, 40]
            assert [one.worker_id for one in first[0].changed] == sorted(
                f"w{i:02}" for i in range(100)
            )
            assert feed.watches == 5
            refused = await refusal(stage.workers.WatchWorkers(request()).read())
            assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
            assert refused.retry_s
            stage.fleet.core.drain("w07")
            stage.fleet.core.remove("w70", 3600.0, stage.fleet.now_s)
            for call in calls:
                changed: list[str] = []
                removed: list[str] = []
                while call is not calls[4] and "w07" not in changed:
                    told = await call.read()
                    changed += [one.worker_id for one in told.changed]
                    removed += [one.worker_id for one in told.removed]
                while call is not calls[3] and "w70" not in removed:
                    removed += [one.worker_id for one in (await call.read()).removed]
            rounds = feed._numbers
            assert feed.statuses_written <= 100 * rounds, "however many watch"
            for call in calls:
                call.cancel()
            writer = feed._writer
            assert writer is not None
            await writer
            assert feed.watches == 0
            before = feed.statuses_written
            await stage.workers.GetIndexStats(fleet_pb2.GetIndexStatsRequest())
            assert feed.statuses_written == before, "nobody watches"
            listed = await stage.workers.ListWorkers(fleet_pb2.ListWorkersRequest(model="n"))
            assert len(listed.workers) == 39

    async def test_a_watcher_that_comes_later_sees_the_round_that_is_there(self) -> None:
        async with served() as stage, asyncio.timeout(30):
            stage.fleet.add("w0")
            request = fleet_pb2.WatchWorkersRequest()
            calls = [stage.workers.WatchWorkers(request) for _ in range(3)]
            told = [await call.read() for call in calls]
            assert [len(one.changed) for one in told] == [1, 1, 1]
            assert stage.watched.statuses_written == stage.watched._numbers
            for call in calls:
                call.cancel()

    async def test_watching_an_empty_fleet_says_so_at_once(self) -> None:
        async with served() as stage, asyncio.timeout(20):
            watch = stage.workers.WatchWorkers(fleet_pb2.WatchWorkersRequest(model="m"))
            told = await watch.read()
            assert (list(told.changed), list(told.removed)) == ([], [])
            watch.cancel()

    async def test_watching_ends_at_once_with_a_drain(self) -> None:
        async with served() as stage, asyncio.timeout(20):
            watch = stage.workers.WatchWorkers(fleet_pb2.WatchWorkersRequest())
            await watch.read()
            stage.stopping.set()
            await stage.server.drain(60)

    async def test_draining_reaches_all_ranks_here_and_every_replica(self) -> None:
        async with served(replica="r1") as stage:
            for rank in range(2):
                stage.fleet.add("w0", rank)
            request = fleet_pb2.DrainWorkerRequest(worker_id="w0")
            assert (await stage.workers.DrainWorker(request)).ranks == 2
            assert (await refusal(stage.router.Route(asked()))).reason == "NO_ELIGIBLE_WORKER"
            request.undrain = True
            assert (await stage.workers.DrainWorker(request)).ranks == 2
            await stage.router.Route(asked())
            assert [(one.action, one.worker_id) for one in stage.sent] == [
                ("drain", "w0"),
                ("undrain", "w0"),
            ]
            assert len({one.id for one in stage.sent}) == 2
            assert all(one.id.startswith("r1-") for one in stage.sent)

    async def test_a_drained_worker_that_is_away_can_be_undrained(self) -> None:
        async with served() as stage:
            stage.fleet.core.drain("away")
            request = fleet_pb2.DrainWorkerRequest(worker_id="away", undrain=True)
            assert (await stage.workers.DrainWorker(request)).ranks == 0
            assert stage.fleet.core.fleet.drained == {}

    async def test_removing_ends_what_is_reserved_there(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            await stage.router.Route(asked())
            request = fleet_pb2.RemoveWorkerRequest(worker_id="w0", tombstone_s=5)
            assert (await stage.workers.RemoveWorker(request)).ranks == 1
            assert stage.fleet.loads() == {}
            assert stage.fleet.core.endings == {"worker_lost": 1}
            (control,) = stage.sent
            assert (control.action, control.tombstone_s) == ("remove", 5)

    @pytest.mark.parametrize("seconds", [-1.0, nan, inf, TOMBSTONE_MAX_S + 1, 1e300])
    async def test_a_tombstone_that_is_no_time_is_refused(self, seconds: float) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            request = fleet_pb2.RemoveWorkerRequest(worker_id="w0", tombstone_s=seconds)
            refused = await refusal(stage.workers.RemoveWorker(request))
            assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert refused.metadata == {"field": "tombstone_s"}
            assert key in stage.fleet.view.sources
            assert stage.sent == []

    async def test_a_removal_for_the_longest_time_is_taken_back_by_undrain(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            request = fleet_pb2.RemoveWorkerRequest(worker_id="w0", tombstone_s=TOMBSTONE_MAX_S)
            await stage.workers.RemoveWorker(request)
            stage.fleet.add("w0")
            assert stage.fleet.view.ranks("w0") == []
            undrain = fleet_pb2.DrainWorkerRequest(worker_id="w0", undrain=True)
            await stage.workers.DrainWorker(undrain)
            stage.fleet.add("w0")
            assert len(stage.fleet.view.ranks("w0")) == 1

    async def test_a_removal_is_taken_back_by_registering_the_worker(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            await stage.workers.RemoveWorker(fleet_pb2.RemoveWorkerRequest(worker_id="w0"))
            engine = {"worker_id": "w0", "engine": "vllm", "address": "http://w0:1"}
            await stage.workers.RegisterWorker(fleet_pb2.RegisterWorkerRequest(**engine))
            assert [one.action for one in stage.sent] == ["remove", "undrain"]
            stage.fleet.add("w0")
            assert len(stage.fleet.view.ranks("w0")) == 1

    async def test_a_command_wins_over_one_of_a_replica_whose_clock_is_ahead(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            stage.commands.apply(
                Control(VERSION, "r2-1", "drain", "w0", 0.0, stage.fleet.now_s + 3600)
            )
            request = fleet_pb2.DrainWorkerRequest(worker_id="w0", undrain=True)
            assert (await stage.workers.DrainWorker(request)).ranks == 1
            assert stage.fleet.core.fleet.drained == {}

    async def test_a_command_that_another_overtakes_under_way_is_aborted(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            newer = Control(VERSION, "r2-1", "undrain", "w0", 0.0, stage.fleet.now_s + 1)
            stage.on_sent = lambda: stage.commands.apply(newer)
            request = fleet_pb2.DrainWorkerRequest(worker_id="w0")
            refused = await refusal(stage.workers.DrainWorker(request))
            assert (refused.code, refused.reason) == (Code.ABORTED, "OVERTAKEN")
            assert stage.fleet.core.fleet.drained == {}

    async def test_resync_asks_the_relay_again(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            resynced: list[str] = []
            stage.commands.on_resync = resynced.append
            request = fleet_pb2.ResyncWorkerRequest(worker_id="w0")
            assert (await stage.workers.ResyncWorker(request)).ranks == 1
            assert resynced == ["w0"]

    @pytest.mark.parametrize("method", ["DrainWorker", "RemoveWorker", "ResyncWorker"])
    async def test_commands_on_a_worker_that_nobody_knows_are_refused(self, method: str) -> None:
        async with served() as stage:
            request = getattr(fleet_pb2, f"{method}Request")(worker_id="none")
            refused = await refusal(getattr(stage.workers, method)(request))
            assert (refused.code, refused.reason) == (Code.NOT_FOUND, "UNKNOWN_WORKER")
            assert "'none'" in refused.message
            assert stage.sent == []

    async def test_a_watch_ends_with_its_age_for_the_client_to_begin_anew(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_feed, "WATCH_S", 0.01)
        settings = GrpcSettings(listen="127.0.0.1:0", max_connection_age_grace_s=0.05)
        async with served(settings) as stage, asyncio.timeout(10):
            watch = stage.workers.WatchWorkers(fleet_pb2.WatchWorkersRequest())
            assert [len(message.changed) async for message in watch] == [0]
            assert await watch.code() is Code.OK

    async def test_a_command_that_others_cannot_hear_says_so_and_has_its_effect_here(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            stage.broker_is_there = False
            request = fleet_pb2.DrainWorkerRequest(worker_id="w0")
            refused = await refusal(stage.workers.DrainWorker(request))
            assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "NO_BROKER")
            assert "took effect here" in refused.message
            assert list(stage.fleet.core.fleet.drained) == ["w0"]

    async def test_an_engine_without_a_relay_can_be_registered(self) -> None:
        async with served() as stage:
            request = fleet_pb2.RegisterWorkerRequest(
                worker_id="w0",
                engine="vllm",
                address="http://w0:8000",
                events="tcp://w0:5557",
                labels={"zone": "north"},
            )
            await stage.workers.RegisterWorker(request)
            (settings,) = stage.registered
            assert (settings.id, settings.engine) == ("w0", "vllm")
            assert (settings.replay, settings.metrics) == (None, None)
            assert settings.labels == {"zone": "north"}

    async def test_routers_may_warm_a_registered_engine_only_where_it_says_so(self) -> None:
        async with served() as stage:
            request = fleet_pb2.RegisterWorkerRequest(
                worker_id="w", engine="vllm", address="http://w:8000", role="prefill"
            )
            for warm in (False, True):
                request.warm = warm
                await stage.workers.RegisterWorker(request)
            assert [one.warm for one in stage.registered] == [False, True]
            assert [one.role for one in stage.registered] == ["prefill", "prefill"]
            request.address = "w:8000"
            refused = await refusal(stage.workers.RegisterWorker(request))
            assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert refused.message == "warm: no HTTP base to compute prefixes by; set `metrics`"
            assert refused.metadata == {"field": "warm"}

    async def test_an_engine_that_publishes_no_events_can_be_registered_too(self) -> None:
        async with served() as stage:
            request = fleet_pb2.RegisterWorkerRequest(worker_id="w", engine="vllm", address="a")
            await stage.workers.RegisterWorker(request)
            assert stage.registered[0].events is None
            request.replay = "tcp://w:2"
            refused = await refusal(stage.workers.RegisterWorker(request))
            assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert refused.message.startswith("replay: no `events` endpoint to go with it")
            assert refused.metadata == {"field": "replay"}

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ({"engine": "other"}, "engine"),
            ({"worker_id": ""}, "worker_id"),
            ({"worker_id": "w" * 257}, "worker_id"),
            ({"address": ""}, "address"),
            ({"address": "h" * 4097}, "address"),
            ({"address": "http://a..b"}, "address"),
            ({"events": "nonsense"}, "events"),
            ({"events": "tcp://host"}, "events"),
            ({"events": "tcp://host:0"}, "events"),
            ({"events": "tcp://host:65536"}, "events"),
            ({"events": "ipc://" + 200 * "p"}, "events"),
            ({"replay": "tcp://host"}, "replay"),
            ({"replay": "udp://host:1"}, "replay"),
            ({"metrics": "http://a..b"}, "metrics"),
            ({"metrics": f"http://{'l' * 64}.example"}, "metrics"),
            ({"metrics": "http://[::1"}, "metrics"),
            ({"metrics": "http://h:x"}, "metrics"),
            ({"metrics": "ftp://h"}, "metrics"),
            ({"role": "judge"}, "role"),
            ({"labels": {f"l{i}": "" for i in range(257)}}, "labels"),
            ({"labels": {"l": "v" * 1025}}, "labels"),
            ({"events": "", "topic": "t"}, "topic"),
            ({"events": "", "events_bind": True}, "events_bind"),
            ({"load": "nonsense"}, "load"),
            ({"ranks": 0}, "ranks"),
            ({"ranks": 1025}, "ranks"),
            ({"ranks": 2, "events": "ipc://x"}, "events"),
            ({"model": "m" * 1025}, "model"),
            ({"model_aliases": ["m" * 1025]}, "model_aliases"),
            ({"model_aliases": ["m"] * 257}, "model_aliases"),
            ({"block_size": 0}, "block_size"),
            ({"block_size": 65537}, "block_size"),
            ({"kv_connector": "c" * 1025}, "kv_connector"),
            ({"kv_engine_id": "c" * 1025}, "kv_engine_id"),
            ({"bootstrap_host": "c" * 1025}, "bootstrap_host"),
            ({"bootstrap_port": 0}, "bootstrap_port"),
            ({"bootstrap_port": 65536}, "bootstrap_port"),
            ({"slots": 0}, "slots"),
            ({"slots": 1 << 31}, "slots"),
        ],
    )
    async def test_an_engine_that_is_none_is_refused(
        self, wrong: dict[str, Any], told: str
    ) -> None:
        async with served() as stage:
            good: dict[str, Any] = {
                "worker_id": "w",
                "engine": "vllm",
                "address": "a",
                "events": "tcp://w:1",
            }
            request = fleet_pb2.RegisterWorkerRequest(**good | wrong)
            refused = await refusal(stage.workers.RegisterWorker(request))
            assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert refused.message.startswith(f"{told}: ")
            assert refused.metadata == {"field": told}
            assert stage.registered == []

    async def test_index_stats(self) -> None:
        async with served() as stage:
            for name in "ab":
                stage.fleet.cache(stage.fleet.add(name), prompt(64))
            stats = await stage.workers.GetIndexStats(fleet_pb2.GetIndexStatsRequest())
            assert (stats.blocks, stats.placements, stats.workers) == (4, 8, 2)
            assert stats.facts_applied == 2
            assert stats.bytes > 0


class TestHealth:
    NAMES = ("", "liveness", "readiness", *SERVICES)

    async def states(self, stage: Served) -> dict[str, int]:
        stub = health_pb2_grpc.HealthStub(stage.channel)
        return {
            name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
            for name in self.NAMES
        }

    async def test_everything_follows_readiness_but_liveness(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        async with served() as stage:
            alive_only = dict.fromkeys(self.NAMES, not_serving) | {"liveness": serving}
            assert await self.states(stage) == alive_only
            await stage.server.set_serving(ready=True)
            assert await self.states(stage) == dict.fromkeys(self.NAMES, serving)
            await stage.server.set_serving(ready=False)
            assert await self.states(stage) == alive_only

    async def test_services_are_those_of_the_contract(self) -> None:
        assert SERVICES == ("kvroute.v1.Router", "kvroute.v1.Fleet", "kvroute.v1.Prompts")

    async def test_an_unknown_name_is_not_found(self) -> None:
        async with served() as stage:
            stub = health_pb2_grpc.HealthStub(stage.channel)
            request = health_pb2.HealthCheckRequest(service="nonsense")
            assert (await refusal(stub.Check(request))).code is Code.NOT_FOUND

    async def test_a_watch_sees_the_drain_and_does_not_hold_it_up(self) -> None:
        async with served() as stage, asyncio.timeout(20):
            await stage.server.set_serving(ready=True)
            before = tasks()
            stub = health_pb2_grpc.HealthStub(stage.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await stage.server.drain(60)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            while left := tasks() - before:
                await asyncio.wait(left, timeout=0.01)

    async def test_who_drains_is_never_ready_again(self) -> None:
        async with served() as stage:
            await stage.server.set_serving(ready=True)
            await stage.server.drain(0)
            await stage.server.set_serving(ready=True)
            # Nobody can ask over the wire any more; a Watch that lags behind still could see it.
            request = health_pb2.HealthCheckRequest(service="")
            told: Any = await stage.server._health.Check(request, None)
            assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING


class TestServer:
    def test_connections_have_an_age_unless_told_otherwise(self) -> None:
        options = dict(server_options(GrpcSettings(), 1))
        assert options["grpc.max_connection_age_ms"] == 300_000
        assert options["grpc.max_connection_age_grace_ms"] == 60_000
        assert options["grpc.keepalive_time_ms"] == 60_000
        for_ever = GrpcSettings(max_connection_age_s=None)
        assert not [name for name, _ in server_options(for_ever, 1) if "connection_age" in name]
        assert for_ever.stream_age_s is None

    def test_a_stream_s_age_is_within_the_grace_of_its_connection(self) -> None:
        settings = GrpcSettings(max_connection_age_grace_s=10.0)
        ages_s = [jittered(settings.stream_age_s) or 0.0 for _ in range(100)]
        assert 4.0 <= min(ages_s) < max(ages_s) <= 8.0
        assert jittered(None) is None

    async def test_reflection_names_every_service(self) -> None:
        async with served() as stage:
            assert await self.reflected(stage) == {
                *SERVICES,
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }

    async def test_reflection_can_be_turned_off(self) -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", reflection=False)
        async with served(settings) as stage:
            stub = reflection_pb2_grpc.ServerReflectionStub(stage.channel)
            call = stub.ServerReflectionInfo()  # a request could meet the call's end half way
            assert await call.code() is Code.UNIMPLEMENTED

    async def reflected(self, stage: Served) -> set[str]:
        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        stub = reflection_pb2_grpc.ServerReflectionStub(stage.channel)
        return {
            service.name
            async for answer in stub.ServerReflectionInfo(ask())
            for service in answer.list_services_response.service
        }

    async def test_a_second_server_on_a_port_fails_and_names_it(self) -> None:
        async with served() as stage:
            listen = f"127.0.0.1:{stage.server.port}"
            with pytest.raises(ConfigError, match=listen):
                async with served(GrpcSettings(listen=listen)):
                    pass

    async def test_a_unix_socket_serves_too(self, tmp_path: Any) -> None:
        path = f"{tmp_path}/s"
        async with served(GrpcSettings(listen="127.0.0.1:0", unix_socket=path)) as stage:
            stage.fleet.add("w0")
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                stage.channel = channel
                assert (await stage.router.Route(asked())).worker_id == "w0"


def test_every_reason_has_a_status() -> None:
    assert set(STATUS) == set(Reason)


class TestPairs:
    async def test_a_pair_is_answered_with_both_halves_and_both_receipts(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", role="prefill", engine="sglang", labels={"host": "h"})
            stage.fleet.add("d", role="decode", engine="sglang")
            answer = await stage.router.Route(asked(1600, phase=router_pb2.PHASE_PREFILL_DECODE))
            other = answer.prefill_worker
            assert (answer.worker_id, other.worker_id) == ("d", "p")
            assert (other.address, other.engine) == ("http://p:8000", "sglang")
            assert (other.bootstrap_host, other.bootstrap_port) == ("p", 8998)
            assert 0 < other.bootstrap_room < 1 << 63
            assert other.labels == {"host": "h"}
            assert not other.HasField("dp_rank")
            assert (answer.new_tokens, other.new_tokens) == (0, 1600)
            assert answer.receipt.prefill == "remote"
            assert answer.receipt.policy == "decode-room"
            assert answer.prefill_receipt.policy == "prefill-queue"
            assert answer.prefill_receipt.picked.worker_id == "p"
            assert answer.prefill_receipt.excluded == {"role is decode": 1}
            for receipt in (answer.receipt, answer.prefill_receipt):
                cost = by_hand(receipt.policy, receipt, receipt.picked)
                assert cost == pytest.approx(receipt.picked.cost)

    async def test_a_vllm_pair_is_told_with_kv_transfer_params(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", 0, role="prefill", multi_rank=True)
            stage.fleet.add("d", role="decode")
            answer = await stage.router.Route(asked(1600, phase=router_pb2.PHASE_PREFILL_DECODE))
            other = answer.prefill_worker
            assert other.HasField("dp_rank")
            assert json.loads(other.prefill_kv_transfer_params)["do_remote_decode"] is True
            assert other.decode_kv_transfer_params == ""

    async def test_a_short_prompt_is_answered_with_one_worker(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", role="prefill")
            stage.fleet.add("d", role="decode")
            answer = await stage.router.Route(asked(100, phase=router_pb2.PHASE_PREFILL_DECODE))
            assert answer.worker_id == "d"
            assert not answer.HasField("prefill_worker")
            assert answer.new_tokens == 100
            assert answer.receipt.prefill == "local"
            assert answer.prefill_receipt.picked.worker_id == "p", "who would have been it"

    async def test_both_receipts_can_be_omitted(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", role="prefill")
            stage.fleet.add("d", role="decode")
            answer = await stage.router.Route(
                asked(1600, phase=router_pb2.PHASE_PREFILL_DECODE, omit_receipt=True)
            )
            assert answer.prefill_worker.worker_id == "p"
            assert not answer.HasField("receipt")
            assert not answer.HasField("prefill_receipt")

    async def test_reports_release_one_half_and_then_the_other(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", role="prefill")
            stage.fleet.add("d", role="decode")
            answer = await stage.router.Route(asked(1600, phase=router_pb2.PHASE_PREFILL_DECODE))
            assert {key.worker_id for key in stage.fleet.loads()} == {"p", "d"}
            for state, left in (("PREFILL_DONE", {"d"}), ("FINISHED", set())):
                step = router_pb2.Progress(
                    reservation_id=answer.reservation_id, state=f"PROGRESS_STATE_{state}"
                )
                told = await stage.router.Report(router_pb2.ReportRequest(progress=[step]))
                assert told.outcomes[0].result == router_pb2.PROGRESS_RESULT_APPLIED
                assert {key.worker_id for key in stage.fleet.loads()} == left

    async def test_explain_shows_both_stages(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", role="prefill", engine="sglang")
            stage.fleet.add("d", role="decode", engine="sglang")
            told = await stage.router.Explain(asked(1600, phase=router_pb2.PHASE_PREFILL_DECODE))
            assert told.worker_id == "d"
            assert told.prefill_worker.worker_id == "p"
            assert not told.prefill_worker.bootstrap_room
            assert [row.worker_id for row in told.candidates] == ["d", "p"]
            assert [row.worker_id for row in told.prefill_candidates] == ["p", "d"]
            assert told.receipt.prefill == "remote"
            assert stage.fleet.loads() == {}

    async def test_pairs_go_over_the_lane_too(self) -> None:
        async with served() as stage:
            stage.fleet.add("p", role="prefill")
            stage.fleet.add("d", role="decode")
            stream = stage.router.RouteStream()
            items = [
                router_pb2.RouteItem(
                    index=i, request=asked(1600, i * 9_000, phase=router_pb2.PHASE_PREFILL_DECODE)
                )
                for i in range(3)
            ]
            await stream.write(router_pb2.RouteBatch(items=items))
            answered = await stream.read()
            assert {one.response.prefill_worker.worker_id for one in answered.results} == {"p"}
            await stream.done_writing()

    async def test_what_pairs_come_to_is_counted(self) -> None:
        async with served() as stage:
            stage.metrics.registry.register(RouterCollector(stage.fleet.core, stage.fleet.clock))
            stage.metrics.registry.register(WorkerCollector(stage.fleet.core))
            stage.fleet.add("p", role="prefill")
            stage.fleet.add("d", role="decode")
            for tokens in (1600, 100):
                await stage.router.Route(asked(tokens, phase=router_pb2.PHASE_PREFILL_DECODE))
            counted = {
                how: stage.metrics.registry.get_sample_value(
                    "kvroute_pair_picks_total", {"prefill": how}
                )
                for how in ("remote", "local", "absent")
            }
            assert counted == {"remote": 1, "local": 1, "absent": 0}
