"""Pairs: who computes a prompt, who decodes, and that both halves are held and released as one."""

import json
from itertools import count
from typing import Any

import pytest

from events.plane.facts import Epoch, Heartbeat
from indexer.identity import WorkerKey
from router.decide.core.progress import Pick, ProgressResult, Repeated
from router.decide.decision.decision import Prefill
from router.decide.decision.handover import bootstrap_server, transfer_params
from router.decide.policies.pair import DECODE_ROOM, PREFILL_QUEUE
from router.fleet.reservations.reservations import Ending
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal
from router.request.request import Role
from tests.stage.fleet import START_S, Fleet, prompt
from tests.stage.rows import rows

LONG = 1600
"""Tokens, all of them new: more than any threshold here."""


def pair(fleet: Fleet, asked: Prompt | None = None, **about: Any) -> Pick:
    return fleet.route(asked or prompt(LONG), role=Role.PAIR, **about)


def halves(pick: Pick) -> tuple[str, str]:
    """Who computes the prompt and who decodes."""
    reservation = pick.reservation
    return reservation.where_computed().worker.worker_id, reservation.worker.worker_id


ROLES = {"p": "prefill", "d": "decode", "w": "both"}


def fleet_of(names: str, **about: Any) -> Fleet:
    """Workers whose roles are those of the first letters of their names."""
    fleet = Fleet()
    for name in names.split():
        fleet.add(name, role=ROLES[name[0]], **about)
    return fleet


def two_and_two(**about: Any) -> Fleet:
    """Two prefill workers and two decode workers."""
    fleet = Fleet(**about)
    for name in ("p0", "p1", "d0", "d1"):
        fleet.add(name, role=ROLES[name[0]])
    for key in fleet.relays:  # who told nothing yet is believed for long to hold what was sent
        fleet.cache(key, prompt(32, 900_000))
    return fleet


def refused(fleet: Fleet, asked: Prompt | None = None, **about: Any) -> Refusal:
    """Why there is no pair; asserts that this changed nothing."""
    before = fleet.loads(), repr(fleet.core.reservations), dict(fleet.core.pair_picks)
    with pytest.raises(Refusal) as caught:
        pair(fleet, asked, **about)
    assert (fleet.loads(), repr(fleet.core.reservations), dict(fleet.core.pair_picks)) == before
    return caught.value


class TestWho:
    def test_a_long_prompt_is_computed_by_one_worker_and_decoded_by_another(self) -> None:
        pick = pair(two_and_two())
        prefill, decode = halves(pick)
        assert prefill in ("p0", "p1")
        assert decode in ("d0", "d1")
        assert pick.decision.how is Prefill.REMOTE
        hold = pick.reservation.prefill
        assert hold is not None
        assert hold.open
        assert (hold.new_tokens, pick.reservation.new_tokens) == (LONG, 0)

    def test_the_prompt_goes_where_its_prefix_is(self) -> None:
        fleet = two_and_two()
        fleet.cache(WorkerKey("p1", 0), prompt(LONG), 800)
        pick = pair(fleet)
        assert halves(pick)[0] == "p1"
        assert pick.reservation.where_computed().predicted_tokens == 800
        assert pick.overlap.usable == 800, "of the worker that computes the prompt"

    def test_unless_more_is_queued_there_than_the_prefix_saves(self) -> None:
        fleet = two_and_two()
        fleet.cache(WorkerKey("p1", 0), prompt(LONG), 800)
        ahead = [pair(fleet, prompt(300, 50_000 * i), excluded_workers=frozenset({"p0"}))
                 for i in range(1, 4)]  # fmt: skip
        # 900 tokens queued at p1, 800 saved there: 900 + 800 against 1600
        first = pair(fleet)
        assert halves(first)[0] == "p0"
        fleet.report(first.reservation, "failed")
        for one in ahead:
            fleet.report(one.reservation, "prefill_done")
        fleet.turn(12.0)  # what was sent and not told is forgotten
        assert halves(pair(fleet))[0] == "p1"

    def test_who_decodes_is_near_to_who_computes(self) -> None:
        fleet = Fleet()
        for i in range(2):
            place = {"host": f"h{i}", "rack": f"r{i}"}
            fleet.add(f"p{i}", role="prefill", labels=place)
            fleet.add(f"d{i}", role="decode", labels=place)
        for i in range(8):
            prefill, decode = halves(pair(fleet, prompt(LONG, 10_000 * i)))
            assert prefill[1] == decode[1]

    def test_unless_it_is_much_fuller(self) -> None:
        fleet = Fleet()
        fleet.add("p0", role="prefill", labels={"host": "h0"})
        near = fleet.add("d0", role="decode", labels={"host": "h0"})
        fleet.add("d1", role="decode", labels={"host": "h1"})
        assert halves(pair(fleet))[1] == "d0"
        fleet.say(near, used_blocks=500.0)
        assert halves(pair(fleet, prompt(LONG, 50_000)))[1] == "d1"

    def test_what_the_way_can_t_save_goes_where_most_blocks_are_free(self) -> None:
        fleet = two_and_two()
        fleet.say(WorkerKey("d0", 0), used_blocks=400.0)
        fleet.say(WorkerKey("d1", 0), used_blocks=300.0)
        assert halves(pair(fleet))[1] == "d1"

    def test_a_request_s_policy_is_that_of_the_prompt(self) -> None:
        fleet = two_and_two()
        fleet.cache(WorkerKey("p1", 0), prompt(LONG))
        turns = [pair(fleet, prompt(LONG + 600 * i), policy="round-robin") for i in range(4)]
        assert sorted(halves(one)[0] for one in turns) == ["p0", "p0", "p1", "p1"]
        assert {one.decision.policy.name for one in turns} == {"decode-room"}

    def test_both_policies_are_a_matter_of_configuration(self) -> None:
        fleet = two_and_two(prefill_policy="ttft", decode_policy="least-loaded")
        pick = pair(fleet)
        assert pick.decision.policy.name == "least-loaded"
        assert pick.decision.computing.policy.name == "ttft"

    @pytest.mark.parametrize("half", ["p1", "d1"])
    def test_what_narrows_the_choice_counts_for_both_halves(self, half: str) -> None:
        fleet = two_and_two()
        for i in range(4):
            assert half not in halves(
                pair(fleet, prompt(LONG, 10_000 * i), excluded_workers=frozenset({half}))
            )

    def test_a_drained_half_is_not_picked(self) -> None:
        fleet = two_and_two()
        fleet.core.drain("p0")
        fleet.core.drain("d1")
        assert {halves(pair(fleet, prompt(LONG, 9_000 * i))) for i in range(4)} == {("p1", "d0")}


class TestThresholds:
    @pytest.mark.parametrize(
        ("tokens", "how"), [(256, Prefill.LOCAL), (257, Prefill.REMOTE), (1, Prefill.LOCAL)]
    )
    def test_a_short_prompt_is_computed_where_it_is_decoded(
        self, tokens: int, how: Prefill
    ) -> None:
        fleet = two_and_two()
        pick = pair(fleet, prompt(tokens))
        assert pick.decision.how is how
        if how is Prefill.LOCAL:
            assert pick.reservation.prefill is None
            assert pick.reservation.new_tokens == tokens
            assert halves(pick)[0] == halves(pick)[1]
            assert halves(pick)[0] in ("d0", "d1")

    @pytest.mark.parametrize(
        ("cached", "how"), [(1520, Prefill.LOCAL), (1504, Prefill.REMOTE), (0, Prefill.REMOTE)]
    )
    def test_a_prompt_of_which_little_is_new_stays_where_it_is_cached(
        self, cached: int, how: Prefill
    ) -> None:
        """5 % of 1600 tokens are 80."""
        fleet = two_and_two(local_prefill_tokens=1)
        fleet.cache(WorkerKey("d1", 0), prompt(LONG), cached)
        pick = pair(fleet)
        assert pick.decision.how is how
        if how is Prefill.LOCAL:
            assert halves(pick) == ("d1", "d1")
            assert pick.reservation.new_tokens == LONG - cached

    def test_what_a_suspect_stream_told_is_not_cached(self) -> None:
        fleet = two_and_two(local_prefill_tokens=1)
        key = WorkerKey("d1", 0)
        fleet.cache(key, prompt(LONG))
        fleet.tell(key, lost=True)
        fleet.beat(key)
        assert pair(fleet).decision.how is Prefill.REMOTE

    def test_a_threshold_of_0_leaves_only_what_is_cached(self) -> None:
        fleet = two_and_two(local_prefill_tokens=0)
        assert pair(fleet, prompt(1)).decision.how is Prefill.REMOTE

    def test_an_sglang_decode_worker_computes_no_prompt(self) -> None:
        fleet = fleet_of("p d", engine="sglang")
        pick = pair(fleet, prompt(1))
        assert halves(pick) == ("p", "d")


class TestWhoCan:
    def test_without_prefill_workers_one_does_all_by_the_policy_of_whole_requests(self) -> None:
        fleet = fleet_of("d0 d1")
        fleet.cache(WorkerKey("d1", 0), prompt(LONG), 800)
        pick = pair(fleet)
        assert pick.decision.how is Prefill.ABSENT
        assert pick.decision.policy.name == "dynamo-adaptive"
        assert halves(pick) == ("d1", "d1")
        assert pick.reservation.new_tokens == 800

    def test_full_prefill_workers_are_none(self) -> None:
        fleet = two_and_two()
        for name in ("p0", "p1"):
            fleet.say(WorkerKey(name, 0), running=100)
        assert pair(fleet).decision.how is Prefill.ABSENT

    def test_workers_without_a_role_serve_alone(self) -> None:
        fleet = Fleet("w0")
        fleet.add("w1", engine="sglang")
        for i in range(4):
            pick = pair(fleet, prompt(LONG, 9_000 * i))
            assert pick.decision.how is Prefill.ABSENT

    def test_unless_they_name_a_connector(self) -> None:
        fleet = Fleet()
        fleet.add("w0", kv_connector="NixlConnector")
        fleet.add("d0", role="decode")
        fleet.say(WorkerKey("w0", 0), used_blocks=900.0)
        assert halves(pair(fleet)) == ("w0", "d0")

    def test_nobody_hands_over_to_itself(self) -> None:
        fleet = Fleet()
        fleet.add("w0", kv_connector="NixlConnector")
        pick = pair(fleet)
        assert halves(pick) == ("w0", "w0")
        assert pick.decision.how is Prefill.LOCAL
        assert pick.reservation.prefill is None

    @pytest.mark.parametrize("about", [{"engine": "sglang"}, {"block_size": 32}])
    def test_halves_are_of_the_same_engine_and_block_size(self, about: dict[str, Any]) -> None:
        fleet = Fleet()
        fleet.add("p0", role="prefill")
        fleet.add("d0", role="decode", used_blocks=500.0)
        fleet.add("p1", role="prefill", **about)
        for i in range(4):
            assert halves(pair(fleet, prompt(LONG, 9_000 * i))) == ("p0", "d0")

    def test_halves_are_of_one_revision_while_one_takes_over_from_another(self) -> None:
        fleet = Fleet()
        ready = dict.fromkeys(("p0", "p1", "d0", "d1"), "v1")
        for name in ready:
            fleet.add(name, role=ROLES[name[0]], labels={"revision": "v1"})
        revisions = set()
        numbers = count()
        for comes, goes in (("p2", "d0"), ("d2", "p0"), ("d3", "d1"), ("p3", "p1")):
            fleet.add(comes, role=ROLES[comes[0]], labels={"revision": "v2"})
            ready[comes] = "v2"
            for _ in range(12):
                pick = pair(fleet, prompt(LONG, 9_000 * next(numbers)))
                assert pick.decision.how is Prefill.REMOTE
                prefill, decode = halves(pick)
                assert ready[prefill] == ready[decode]
                revisions.add(ready[decode])
                fleet.core.withdraw(pick.reservation, fleet.now_s)
                row = pick.decision.order[-1]
                assert ready[pick.decision.rows.workers[row].worker_id] == ready[decode]
            fleet.core.remove(goes, 60.0, fleet.now_s)
        assert revisions == {"v1", "v2"}

    def test_halves_of_two_revisions_are_no_pair(self) -> None:
        fleet = Fleet()
        fleet.add("p0", role="prefill", labels={"revision": "v1"})
        fleet.add("d0", role="decode", labels={"revision": "v2"})
        pick = pair(fleet)
        assert (halves(pick), pick.decision.how) == (("d0", "d0"), Prefill.ABSENT)
        assert pick.decision.prefill is not None
        assert pick.decision.prefill.exclusions()["no worker can take over from it"] == 1

    @pytest.mark.parametrize("names", [(), ("release",)])
    def test_labels_that_are_not_named_keep_nobody_apart(self, names: tuple[str, ...]) -> None:
        fleet = Fleet(pair_labels=names)
        fleet.add("p0", role="prefill", labels={"revision": "v1", "release": "x"})
        fleet.add("d0", role="decode", labels={"release": "x"})
        assert halves(pair(fleet)) == ("p0", "d0")

    def test_alternatives_can_do_what_the_pick_was_to_do(self) -> None:
        fleet = fleet_of("p d0 d1", engine="sglang")
        fleet.add("alone", engine="sglang")

        def order(tokens: int) -> list[str]:
            decision = fleet.decide(prompt(tokens), role=Role.PAIR)
            return [decision.rows.workers[row].worker_id for row in decision.order]

        fleet.say(WorkerKey("alone", 0), used_blocks=500.0)
        assert sorted(order(100)) == sorted(order(LONG)) == ["d0", "d1"]
        for name in ("d0", "d1"):
            fleet.say(WorkerKey(name, 0), used_blocks=900.0)
        assert order(100) == ["alone"]

    def test_full_decode_workers_are_worth_another_try(self) -> None:
        for engine in ("vllm", "sglang"):
            fleet = fleet_of("p", engine=engine)
            fleet.add("d", role="decode", engine=engine, running=100)
            refusal = refused(fleet)
            assert refusal.reason is Reason.ALL_WORKERS_FULL
            assert refusal.retry_after_s

    def test_full_prefill_workers_are_where_nobody_serves_alone(self) -> None:
        fleet = Fleet()
        fleet.add("p", role="prefill", engine="sglang", running=100)
        fleet.add("d", role="decode", engine="sglang")
        assert refused(fleet).reason is Reason.ALL_WORKERS_FULL

    def test_prefill_workers_alone_are_no_pair(self) -> None:
        fleet = fleet_of("p")
        refusal = refused(fleet)
        assert refusal.reason is Reason.NO_ELIGIBLE_WORKER
        assert "role is prefill" in refusal.message or "no worker can take over" in refusal.message

    def test_a_fleet_that_is_gone_is_no_pair(self) -> None:
        assert refused(Fleet()).reason is Reason.NO_WORKER

    def test_a_prompt_too_long_for_all_is_told_so(self) -> None:
        fleet = fleet_of("p d", max_model_len=1000)
        assert refused(fleet).reason is Reason.PROMPT_TOO_LONG


class TestHeldAsOne:
    def test_both_halves_are_reserved_at_once(self) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        prefill, decode = halves(pick)
        assert fleet.loads() == {
            WorkerKey(prefill, 0): (1, 100, LONG),
            WorkerKey(decode, 0): (1, 100, 0),
        }

    def test_prefill_done_releases_the_one_half(self) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        _, decode = halves(pick)
        assert fleet.report(pick.reservation, "prefill_done") is ProgressResult.APPLIED
        assert fleet.loads() == {WorkerKey(decode, 0): (1, 100, 0)}
        assert fleet.report(pick.reservation, "prefill_done") is ProgressResult.UNCHANGED
        assert fleet.loads() == {WorkerKey(decode, 0): (1, 100, 0)}
        assert fleet.report(pick.reservation, "finished") is ProgressResult.APPLIED
        assert fleet.loads() == {}

    def test_output_says_that_the_prompt_is_done(self) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        fleet.report(pick.reservation, "running", output_tokens=1)
        assert list(fleet.loads()) == [pick.reservation.worker]

    @pytest.mark.parametrize("end", ["finished", "failed", "lease", "withdrawn"])
    @pytest.mark.parametrize("done", [False, True])
    def test_any_end_releases_both_once(self, end: str, done: bool) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        if done:
            fleet.report(pick.reservation, "prefill_done")
        if end == "lease":
            fleet.turn(121.0)
        elif end == "withdrawn":
            fleet.core.withdraw(pick.reservation, fleet.now_s)
        else:
            fleet.report(pick.reservation, end)
        assert fleet.loads() == {}
        for state in ("prefill_done", "finished", "failed"):
            fleet.report(pick.reservation, state)
        assert fleet.loads() == {}
        assert fleet.core.endings.total() == 1

    def test_a_lost_prefill_worker_ends_it_while_it_computes(self) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        prefill, _ = halves(pick)
        fleet.core.remove(prefill, 60.0, fleet.now_s)
        assert pick.reservation.ended is Ending.WORKER_LOST
        assert fleet.loads() == {}
        assert fleet.report(pick.reservation, "finished") is ProgressResult.UNKNOWN

    def test_and_does_no_harm_afterwards(self) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        prefill, decode = halves(pick)
        fleet.report(pick.reservation, "prefill_done")
        fleet.core.remove(prefill, 60.0, fleet.now_s)
        assert pick.reservation.ended is None
        assert fleet.loads() == {WorkerKey(decode, 0): (1, 100, 0)}
        fleet.core.remove(decode, 60.0, fleet.now_s)
        assert pick.reservation.ended is Ending.WORKER_LOST

    def test_the_same_request_again_gets_the_same_pair(self) -> None:
        fleet = two_and_two()
        first = pair(fleet, request_id="x")
        before = fleet.loads()
        again = fleet.core.route(
            fleet.request(prompt(LONG), request_id="x", role=Role.PAIR), fleet.now_s
        )
        assert isinstance(again, Repeated)
        assert again.reservation is first.reservation
        assert fleet.loads() == before

    def test_the_same_id_for_one_half_is_another_request(self) -> None:
        fleet = two_and_two()
        pair(fleet, request_id="x")
        with pytest.raises(Refusal) as caught:
            fleet.route(prompt(LONG), request_id="x", role=Role.PREFILL)
        assert caught.value.reason is Reason.REQUEST_ID_REUSED

    def test_both_are_predicted_to_hold_the_prompt(self) -> None:
        fleet = two_and_two()
        pick = pair(fleet)
        for name in halves(pick):
            slot = fleet.view.sources[WorkerKey(name, 0)].slot
            assert fleet.view.index.predicted(slot) == 100

    def test_cached_tokens_are_those_of_the_worker_that_computed(self) -> None:
        fleet = two_and_two()
        fleet.cache(WorkerKey("p1", 0), prompt(LONG), 800)
        pick = pair(fleet)
        fleet.report(pick.reservation, "prefill_done", cached_tokens=800)
        known = fleet.core.fleet.cache_reports
        assert {key.worker_id: (one.predicted, one.reported) for key, one in known.items()} == {
            "p1": (800, 800)
        }
        assert fleet.core.fleet.self_check.results == {"exact": 1}

    def test_a_measured_prompt_counts_for_the_worker_that_computed(self) -> None:
        fleet = two_and_two(prefill_policy="ttft")
        pick = pair(fleet)
        fleet.now_s += 0.5
        fleet.report(pick.reservation, "prefill_done")
        prefill, decode = (WorkerKey(name, 0) for name in halves(pick))
        assert fleet.core.fleet.rates.samples(prefill) == 1
        assert fleet.core.fleet.rates.samples(decode) == 0

    def test_how_often_is_counted(self) -> None:
        fleet = two_and_two()
        for i in range(3):
            pair(fleet, prompt(LONG, 9_000 * i))
        pair(fleet, prompt(9))
        assert fleet.core.pair_picks == {Prefill.REMOTE: 3, Prefill.LOCAL: 1}

    def test_to_explain_reserves_nothing(self) -> None:
        fleet = two_and_two()
        decision = fleet.decide(prompt(LONG), role=Role.PAIR)
        assert decision.how is Prefill.REMOTE
        assert fleet.loads() == {}
        assert not fleet.core.pair_picks


class TestCosts:
    def test_prefill_queue_in_tokens(self) -> None:
        made = rows(
            1000,
            {"prefill_tokens_active": 0.0},
            {"prefill_tokens_active": 700.0, "device_tokens": 320},
            {"prefill_tokens_active": 300.0, "device_tokens": 640},
        )
        # 0 + 1000; 700 + 680; 300 + 360
        assert PREFILL_QUEUE.score(made).costs.tolist() == [1000.0, 1380.0, 660.0]

    def test_decode_room_by_hand(self) -> None:
        made = rows(
            1000,
            # 63 blocks needed: (100 + 63) / 1000 + 10 / 100 + 0.05 * (1 + 0) / 4
            {"active_blocks": 100.0, "total_blocks": 1000.0, "running": 10.0, "total_slots": 100.0},
            # (40 + 63) / 100 and no room; 0 / 256; as far
            {"active_blocks": 40.0, "total_blocks": 100.0},
            # unknown totals: 0 + 64 / 256; 640 tokens are there: 0.05 * 0.25 * 0.36
            {"running": 64.0, "device_tokens": 640},
        )
        assert DECODE_ROOM.score(made).costs.tolist() == pytest.approx(
            [0.163 + 0.1 + 0.0125, 1.03 + 0.0125 + 1000, 0.25 + 0.0045]
        )

    def test_decode_room_counts_a_block_that_several_use_once(self) -> None:
        made = rows(160, {"active_blocks": 10.0, "total_blocks": 100.0, "in_use": 8})
        assert DECODE_ROOM.score(made).row_terms["kv_share"].tolist() == [0.12]

    def test_decode_room_counts_the_output_that_is_expected(self) -> None:
        worker = {"active_blocks": 0.0, "total_blocks": 100.0}
        told = rows(160, worker, request={"expected_output_tokens": 1440})
        assert DECODE_ROOM.score(told).row_terms["need_blocks"].tolist() == [100.0]
        assert DECODE_ROOM.score(told).row_terms["no_room"].tolist() == [0.0]
        told = rows(160, worker, request={"expected_output_tokens": 1441})
        assert DECODE_ROOM.score(told).row_terms["no_room"].tolist() == [1.0]


def heartbeat(**about: Any) -> Heartbeat:
    said = {"address": "http://10.0.0.7:8000", "engine": "vllm"} | about
    return Heartbeat(epoch=Epoch(1, 1), sent_at_s=START_S, **said)


class TestHandOver:
    def test_sglang_tells_its_bootstrap_server(self) -> None:
        told = heartbeat(engine="sglang")
        assert (*bootstrap_server(told), *transfer_params(told, 5)) == ("10.0.0.7", 8998, "", "")
        told = heartbeat(engine="sglang", bootstrap_host="ib0.node", bootstrap_port=9001)
        assert bootstrap_server(told) == ("ib0.node", 9001)

    def test_nixl_is_told_that_another_one_decodes_and_answers_the_rest(self) -> None:
        prefill, decode = transfer_params(heartbeat(), 5)
        assert json.loads(prefill) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert (decode, bootstrap_server(heartbeat())) == ("", ("", 0))

    def test_mooncake_tells_both_one_transfer(self) -> None:
        told = heartbeat(kv_connector="MooncakeConnector", kv_engine_id="e7")
        prefill, decode = transfer_params(told, 255)
        assert json.loads(prefill) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "kvroute-ff",
        }
        assert json.loads(decode) == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "kvroute-ff",
            "remote_bootstrap_addr": "http://10.0.0.7:8998",
            "remote_engine_id": "e7",
        }

    def test_a_decode_worker_is_sent_to_no_mooncake_engine_whose_id_is_unknown(self) -> None:
        fleet = Fleet()
        fleet.add("p0", role="prefill", kv_connector="MooncakeConnector")
        fleet.add("d0", role="decode")
        told = pair(fleet)
        assert (told.decision.how, halves(told)) == (Prefill.ABSENT, ("d0", "d0"))
        fleet.say(WorkerKey("p0", 0), kv_engine_id="e7")
        assert halves(pair(fleet, prompt(LONG, 9_000))) == ("p0", "d0")

    def test_rooms_say_the_rank_and_are_all_different(self) -> None:
        fleet = Fleet()
        for rank in range(3):
            fleet.add("p", rank, role="prefill", engine="sglang", multi_rank=True)
        fleet.add("d", role="decode", engine="sglang", total_blocks=None)
        rooms = set()
        for i in range(12):
            hold = pair(fleet, prompt(LONG, 9_000 * i)).reservation.prefill
            assert hold is not None
            assert hold.room % 3 == hold.worker.dp_rank
            assert 0 < hold.room < 1 << 63
            rooms.add(hold.room)
        assert len(rooms) == 12
