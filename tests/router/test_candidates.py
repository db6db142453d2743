"""The table a decision is made of: what its columns say of real heartbeats, and what it derives."""

from math import isnan

import numpy as np

from events.stream import StreamState
from indexer.identity import Tier, WorkerKey
from router.candidates import COLUMNS, Candidates
from tests.router.fleet import Fleet, prompt
from tests.router.rows import rows


def table(fleet: Fleet, tokens: int = 64) -> Candidates:
    return fleet.core.decide(fleet.request(prompt(tokens)), fleet.now_s).rows


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

    def test_every_column_but_the_totals_is_always_a_number(self) -> None:
        fleet = Fleet()
        fleet.add("w0", total_blocks=None, sampled_at_s=None, block_size=0, model="")
        candidates = table(fleet)
        for name in (*COLUMNS, "overlap_tokens", "new_tokens"):
            column = getattr(candidates, name)
            assert column.dtype == np.float64, name
            assert name.startswith("total_") or np.isfinite(column).all(), name

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
