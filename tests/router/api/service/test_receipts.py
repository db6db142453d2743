"""Receipts of Route and answers of Explain: rows carry every number that a cost was made of."""

import json

import numpy as np
import pytest

from indexer.identity import WorkerKey
from kvroute.v1 import router_pb2
from router.decide.policies import POLICIES
from router.observe.metrics.families import export
from router.observe.metrics.of_fleet import fleet_metrics
from router.observe.metrics.of_workers import worker_metrics
from tests.router.api.service.by_hand import by_hand
from tests.router.api.service.setting import full, sick
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import Served, asked, refusal, taken_apart


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
        self, policy: str, empty: Served
    ) -> None:
        self.uneven(empty.fleet)
        explained = await empty.router.Explain(asked(510, policy=policy))
        answer = await empty.route(510, policy=policy)
        receipt = answer.receipt
        for row in (receipt.picked, receipt.runner_up):
            assert by_hand(policy, receipt, row) == pytest.approx(row.cost, abs=1e-12)
        drawn = "chance" in receipt.picked.terms
        assert receipt.picked.cost <= receipt.runner_up.cost or drawn
        assert answer.worker_id == receipt.picked.worker_id
        costs = {
            row.worker_id: by_hand(policy, explained.receipt, row) for row in explained.candidates
        }
        assert len(costs) == 5
        cheapest = min(costs.values())
        assert costs[answer.worker_id] == pytest.approx(cheapest, abs=1e-12) or drawn
        tied = [cost for cost in costs.values() if cost == pytest.approx(cheapest, abs=1e-12)]
        assert receipt.tied == len(tied)

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    async def test_the_formula_is_arithmetic_over_names_that_the_receipt_explains(
        self, policy: str, empty: Served
    ) -> None:
        self.uneven(empty.fleet)
        receipt = (await empty.route(510, policy=policy)).receipt
        for row in (receipt.picked, receipt.runner_up):
            names = {**receipt.parameters, **receipt.terms, **row.terms}
            expression = compile(receipt.formula.split(";")[0], "formula", "eval")
            assert eval(expression, {}, names) == pytest.approx(row.cost, abs=1e-12)

    async def test_terms_common_to_all_are_recomputed_from_the_explained_rows(
        self, empty: Served
    ) -> None:
        self.uneven(empty.fleet)
        explained = await empty.router.Explain(asked(510, policy="dynamo-adaptive"))
        loads = [
            row.active_blocks / row.total_blocks if row.total_blocks else 0.0
            for row in explained.candidates
        ]
        terms = explained.receipt.terms
        assert terms["load_mean"] == pytest.approx(sum(loads) / 5)
        assert terms["load_std"] == pytest.approx(np.std(loads))
        explained = await empty.router.Explain(asked(510, policy="dynamo-logit"))
        queues = [max(0.0, row.waiting + row.reserved) for row in explained.candidates]
        assert explained.receipt.terms["waiting_max"] == max(queues)

    async def test_a_row_says_what_its_overlap_is_worth(self, empty: Served) -> None:
        self.uneven(empty.fleet)
        rows = (await empty.router.Explain(asked(510))).candidates
        for row in rows:
            usable = row.overlap_tokens.usable
            assert row.new_tokens == 510 - row.trust * usable
        recovering = next(row for row in rows if row.worker_id == "w4")
        assert (recovering.trust, recovering.stream_state) == (0.5, "recovering")
        ages = {row.worker_id: row.sample_age_s for row in rows}
        assert ages == dict.fromkeys(("w0", "w1", "w2", "w3"), 0.0) | {"w4": 0.5}

    async def test_exclusions_are_counted_by_reason(self, empty: Served) -> None:
        fleet = empty.fleet
        for i in range(4):
            fleet.add(f"w{i}")
        fleet.core.drain("w0")
        fleet.say(WorkerKey("w1", 0), healthy=False)
        fleet.say(WorkerKey("w2", 0), running=1000)
        receipt = (await empty.route()).receipt
        assert receipt.excluded == {"drained": 1, "engine not answering": 1, "full": 1}
        assert receipt.candidates == 4
        assert receipt.tied == 1
        assert not receipt.HasField("runner_up")


class TestExplain:
    async def test_it_reserves_nothing_and_says_who_would_be_picked(self, empty: Served) -> None:
        fleet = empty.fleet
        for i in range(3):
            fleet.cache(fleet.add(f"w{i}"), prompt(100), 32 * i)
        before = empty.state()
        for _ in range(3):
            explained = await empty.router.Explain(asked(100, request_id="x"))
            assert explained.worker_id == "w2"
        assert empty.state() == before
        assert [row.worker_id for row in explained.candidates] == ["w2", "w1", "w0"]
        assert not explained.HasField("refusal")
        assert empty.requests("explained") == 3
        assert (await empty.route(100, request_id="x")).worker_id == "w2"

    async def test_excluded_workers_come_last_with_their_reasons(self, empty: Served) -> None:
        fleet = empty.fleet
        for name in ("drained", "full", "sick", "well"):
            fleet.add(name, total_slots=5)
        fleet.core.drain("drained")
        fleet.say(WorkerKey("full", 0), running=5)
        fleet.say(WorkerKey("sick", 0), healthy=False)
        explained = await empty.router.Explain(asked())
        rows = [(row.worker_id, row.excluded) for row in explained.candidates]
        assert rows[0] == ("well", "")
        assert dict(rows[1:]) == {
            "drained": "drained",
            "full": "full",
            "sick": "engine not answering",
        }

    async def test_when_nobody_can_be_picked_it_says_what_route_would_have_answered(
        self, empty: Served
    ) -> None:
        full(empty.fleet)
        explained = await empty.router.Explain(asked())
        assert explained.worker_id == ""
        refused = await refusal(empty.route())
        assert taken_apart(explained.refusal) == refused
        assert refused.reason == "ALL_WORKERS_FULL"
        assert [row.excluded for row in explained.candidates] == ["full"]

    async def test_a_pool_without_live_workers_is_explained_too(self, empty: Served) -> None:
        sick(empty.fleet)
        explained = await empty.router.Explain(asked())
        assert taken_apart(explained.refusal).reason == "NO_WORKER"
        (row,) = explained.candidates
        assert (row.worker_id, row.excluded) == ("w0", "engine not answering")
        assert explained.receipt.candidates == 1

    async def test_a_request_that_is_none_is_refused(self, stage: Served) -> None:
        refused = await refusal(stage.router.Explain(router_pb2.RouteRequest()))
        assert refused.reason == "EMPTY_PROMPT"


class TestPairs:
    async def test_a_pair_is_answered_with_both_halves_and_both_receipts(
        self, empty: Served
    ) -> None:
        empty.fleet.add("p", role="prefill", engine="sglang", labels={"host": "h"})
        empty.fleet.add("d", role="decode", engine="sglang")
        answer = await empty.route(1600, phase=router_pb2.PHASE_PREFILL_DECODE)
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

    async def test_a_vllm_pair_is_told_with_kv_transfer_params(self, empty: Served) -> None:
        empty.fleet.add("p", 0, role="prefill", multi_rank=True)
        empty.fleet.add("d", role="decode")
        answer = await empty.route(1600, phase=router_pb2.PHASE_PREFILL_DECODE)
        other = answer.prefill_worker
        assert other.HasField("dp_rank")
        assert json.loads(other.prefill_kv_transfer_params)["do_remote_decode"] is True
        assert other.decode_kv_transfer_params == ""

    async def test_a_short_prompt_is_answered_with_one_worker(self, empty: Served) -> None:
        empty.fleet.add_pair()
        answer = await empty.route(100, phase=router_pb2.PHASE_PREFILL_DECODE)
        assert answer.worker_id == "d"
        assert not answer.HasField("prefill_worker")
        assert answer.new_tokens == 100
        assert answer.receipt.prefill == "local"
        assert answer.prefill_receipt.picked.worker_id == "p", "who would have been it"

    async def test_both_receipts_can_be_omitted(self, empty: Served) -> None:
        empty.fleet.add_pair()
        answer = await empty.route(1600, phase=router_pb2.PHASE_PREFILL_DECODE, omit_receipt=True)
        assert answer.prefill_worker.worker_id == "p"
        assert not answer.HasField("receipt")
        assert not answer.HasField("prefill_receipt")

    async def test_reports_release_one_half_and_then_the_other(self, empty: Served) -> None:
        empty.fleet.add_pair()
        answer = await empty.route(1600, phase=router_pb2.PHASE_PREFILL_DECODE)
        assert {key.worker_id for key in empty.fleet.loads()} == {"p", "d"}
        for state, left in (("prefill_done", {"d"}), ("finished", set())):
            told = await empty.report(answer.reservation_id, state)
            assert told.outcomes[0].result == router_pb2.PROGRESS_RESULT_APPLIED
            assert {key.worker_id for key in empty.fleet.loads()} == left

    async def test_explain_shows_both_stages(self, empty: Served) -> None:
        empty.fleet.add_pair(engine="sglang")
        told = await empty.router.Explain(asked(1600, phase=router_pb2.PHASE_PREFILL_DECODE))
        assert told.worker_id == "d"
        assert told.prefill_worker.worker_id == "p"
        assert not told.prefill_worker.bootstrap_room
        assert [row.worker_id for row in told.candidates] == ["d", "p"]
        assert [row.worker_id for row in told.prefill_candidates] == ["p", "d"]
        assert told.receipt.prefill == "remote"
        assert empty.fleet.loads() == {}

    async def test_pairs_go_over_the_stream_too(self, empty: Served) -> None:
        empty.fleet.add_pair()
        pair = {"phase": router_pb2.PHASE_PREFILL_DECODE}
        stream = await empty.stream(*(asked(1600, i * 9_000, **pair) for i in range(3)))
        answered = await stream.read()
        assert {one.response.prefill_worker.worker_id for one in answered.results} == {"p"}
        await stream.done_writing()

    async def test_what_pairs_come_to_is_counted(self, empty: Served) -> None:
        export(empty.metrics.registry, fleet_metrics, empty.fleet.core, empty.fleet.clock)
        export(empty.metrics.registry, worker_metrics, empty.fleet.core)
        empty.fleet.add_pair()
        for tokens in (1600, 100):
            await empty.route(tokens, phase=router_pb2.PHASE_PREFILL_DECODE)
        hows = ("remote", "local", "absent")
        counted = {how: empty.metric("marked_picks_total", mark=f"pair_{how}") for how in hows}
        assert counted == {"remote": 1, "local": 1, "absent": 0}
