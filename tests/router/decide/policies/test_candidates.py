"""The table a decision is made of: what its columns say of real heartbeats, and what it derives."""

from math import isnan

import numpy as np

from events.feed.stream import StreamState
from indexer.identity import Tier, WorkerKey
from router.decide.policies.candidates import Candidates
from router.fleet.table import COLUMNS, NUMBERS_FROM
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import rows


def table(fleet: Fleet, tokens: int = 64) -> Candidates:
    return fleet.decide(prompt(tokens)).rows


class TestDerived:
    def test_active_slots_are_what_runs_what_waits_and_what_is_on_its_way(self) -> None:
        candidates = rows(10, {"running": 3, "waiting": 2, "reserved": 1}, {"reserved": -1})
        assert candidates.active_slots.tolist() == [6, -1]

    def test_no_slot_or_no_block_left_is_full_and_an_unknown_total_never_is(self) -> None:
        fullness = rows(
            10,
            {"running": 3, "waiting": 1, "reserved": 1, "total_slots": 5},
            {"running": 3, "waiting": 1, "total_slots": 5},
            {"active_blocks": 100, "total_blocks": 100},
            {"active_blocks": 99.5, "total_blocks": 100},
            {"active_blocks": 1e9, "running": 1e9},
        ).full
        assert fullness.tolist() == [True, False, True, False, False]

    def test_ratios_are_zero_where_the_total_is_unknown(self) -> None:
        candidates = rows(
            10, {"active_blocks": 5, "running": 5}, {"active_blocks": 5, "total_blocks": 10}
        )
        assert candidates.load.tolist() == [0.0, 0.5]
        assert candidates.slot_ratio.tolist() == [0.0, 0.0]

    def test_no_rows_are_a_table_too(self) -> None:
        assert len(rows(10)) == 0
        assert rows(10).full.tolist() == []


class TestColumns:
    def test_a_row_is_what_its_workers_heartbeat_and_our_reservations_say(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0", total_blocks=200, total_slots=8, block_size=32)
        fleet.say(key, running=2, waiting=1, used_blocks=20.0)
        fleet.route(prompt(100))  # 3 full blocks of 32, and a tail of 4 tokens
        (row,) = range(len(candidates := table(fleet)))
        assert candidates.workers == (key,)
        assert candidates.prompt_tokens == 64
        assert candidates.block_size[row] == 32
        assert (candidates.running[row], candidates.waiting[row]) == (2, 1)
        assert candidates.reserved[row] == 1
        assert candidates.active_blocks[row] == 20 + 4
        assert (candidates.total_blocks[row], candidates.total_slots[row]) == (200, 8)
        assert candidates.prefill_tokens_active[row] == 100
        assert candidates.last_picked[row] == 1
        assert list(candidates.excluded) == [""]

    def test_what_an_engine_does_not_tell_is_not_a_number(self) -> None:
        fleet = Fleet()
        fleet.add("silent", total_blocks=None, total_slots=None)
        fleet.add("zero", total_blocks=0, total_slots=0)
        candidates = table(fleet)
        assert all(map(isnan, candidates.total_blocks))
        assert all(map(isnan, candidates.total_slots))
        assert not candidates.full.any()
        assert candidates.load.tolist() == [0, 0]

    def test_columns_but_totals_predictions_and_the_engines_own_are_always_numbers(self) -> None:
        fleet = Fleet()
        fleet.add("w0", total_blocks=None, sampled_at_s=None, block_size=0, model="")
        candidates = table(fleet)
        for name in (*COLUMNS[:NUMBERS_FROM], "overlap_tokens", "new_tokens"):
            column = getattr(candidates, name)
            assert column.dtype == np.float64, name
            assert name.startswith(("total_", "tpot_s")) or np.isfinite(column).all(), name

    def test_trust_takes_its_share_of_the_overlap(self) -> None:
        fleet = Fleet()
        asked = prompt(65)
        live, recovering = fleet.add("live"), fleet.add("recovering")
        for key in (live, recovering):
            fleet.cache(key, asked)
        fleet.tell(recovering, lost=True)
        fleet.beat(recovering)  # shows the lost tail
        assert fleet.view.sources[recovering].stream.state is StreamState.RECOVERING
        candidates = table(fleet, 65)
        assert candidates.trust.tolist() == [1.0, 0.5]
        assert candidates.overlap_tokens.tolist() == [64, 32]
        assert candidates.new_tokens.tolist() == [1, 33]

    def test_rows_line_up_with_their_workers_whatever_holes_slots_have(self) -> None:
        fleet = Fleet()
        asked = prompt(65)
        for i in range(6):
            fleet.cache(fleet.add(f"w{i}", total_blocks=100 + i), asked, 16 * (i % 5))
        fleet.core.remove("w1", 60.0, fleet.now_s)
        fleet.core.remove("w4", 60.0, fleet.now_s)
        fleet.cache(fleet.add("w9", total_blocks=109), asked, 48, Tier.HOST)  # takes a freed slot
        candidates = table(fleet, 65)
        told = zip(
            candidates.workers,
            candidates.overlap_tokens.tolist(),
            candidates.total_blocks.tolist(),
            strict=True,
        )
        assert {key.worker_id: (overlap, total) for key, overlap, total in told} == {
            "w0": (0, 100),
            "w2": (32, 102),
            "w3": (48, 103),
            "w5": (0, 105),
            "w9": (48, 109),
        }
        assert WorkerKey("w1", 0) not in candidates.workers


class TestMadeWhenAskedFor:
    def test_overlap_by_tier_is_trusted_as_the_whole_is(self) -> None:
        fleet = Fleet()
        asked = prompt(160)
        key = fleet.add("w0")
        fleet.cache(key, asked, 32)
        fleet.store(key, asked.prefixes(16)[2:5], Tier.HOST)
        fleet.store(key, asked.prefixes(16)[5:6], Tier.DISK)
        candidates = table(fleet, 160)
        assert candidates.device_tokens.tolist() == [32]
        assert candidates.host_tokens.tolist() == [48]
        assert candidates.disk_tokens.tolist() == [16]
        fleet.tell(key, lost=True)
        fleet.beat(key)  # recovering
        halved = table(fleet, 160)
        assert halved.host_tokens.tolist() == [24]
        assert halved.overlap_tokens.tolist() == [48]

    def test_what_is_predicted_will_be_on_the_device(self) -> None:
        fleet = Fleet("w0")
        fleet.route(prompt(64))
        assert table(fleet, 160).device_tokens.tolist() == [64]

    def test_blocks_that_our_requests_share_are_not_new(self) -> None:
        fleet = Fleet("w0")
        fleet.add("w1", block_size=0)
        fleet.route(prompt(100), allowed_workers=frozenset({"w0"}))
        candidates = table(fleet, 168)
        assert candidates.prompt_blocks.tolist() == [11, 168]
        assert candidates.new_blocks.tolist() == [11 - 6, 168]
        assert candidates.free_blocks.tolist() == [1000 - 7, 1000]

    def test_blocks_are_free_without_end_where_nobody_knows_how_many_there_are(self) -> None:
        assert rows(10, {"active_blocks": 9}).free_blocks.tolist() == [np.inf]

    def test_rows_can_take_a_request_unless_they_are_excluded_or_full(self) -> None:
        said = {"excluded": "drained"}, {"active_blocks": 1, "total_blocks": 1}, {"running": 9}
        assert rows(10, *said).can_take.tolist() == [False, False, True]

    def test_requests_of_a_session_share_a_key_and_so_do_prompts_that_start_alike(self) -> None:
        fleet = Fleet("w0")

        def key(tokens: int, **about: str) -> int:
            request = fleet.request(prompt(tokens), **about)
            return fleet.core.decide(request, fleet.now_s).rows.affinity_key

        assert key(64, session_id="a") == key(96, session_id="a") != key(64, session_id="b")
        assert key(64) == key(96)
        assert key(8) == key(8) != key(9)
        assert 0 <= key(8) < 1 << 64

    def test_where_a_worker_is_is_read_from_its_labels_as_they_change(self) -> None:
        fleet = Fleet()
        here = fleet.add("w0", labels={"host": "a"})
        fleet.add("w1", labels={"host": "a"})
        first = np.array([True, False])
        assert table(fleet).mean_distance(first).tolist() == [0, 0]
        fleet.say(here, labels={"host": "b"})
        assert table(fleet).mean_distance(first).tolist() == [0, 3]
