"""Which blocks of a prompt count as held, by trust, predictions and memory."""

import pytest

from events.feed.stream import StreamState
from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import Tier, WorkerKey
from router.decide.decision.decision import Overlap
from router.request.prompt import Prompt
from tests.router.decide.core.outcomes import excluded, overlap, overlaps
from tests.stage.fleet import Fleet, prompt


class TestOverlap:
    def test_a_request_goes_where_its_prefix_is(self) -> None:
        fleet = Fleet("w0", "w1", "w2", "w3")
        asked = prompt(100)
        fleet.cache(WorkerKey("w2", 0), asked)
        pick = fleet.route(asked)
        assert pick.reservation.worker == ("w2", 0)
        assert pick.reservation.predicted_tokens == 96
        assert pick.reservation.new_tokens == 4

    def test_overlap_is_told_by_the_fastest_tier_that_holds_each_block(self, fleet: Fleet) -> None:
        key, asked = fleet.add("w0"), prompt(100)
        fleet.cache(key, asked, 32, Tier.DEVICE)
        fleet.cache(key, asked, 64, Tier.HOST)
        fleet.cache(key, asked, 80, Tier.DISK)
        assert overlap(fleet, asked) == Overlap(80, 80, 32, 32, 16, 0)

    def test_a_fully_cached_prompt_has_its_last_block_computed_again(self, fleet: Fleet) -> None:
        key, asked = fleet.add("w0"), prompt(64)
        fleet.cache(key, asked, 48, Tier.DEVICE)
        fleet.cache(key, asked, 64, Tier.HOST)
        # (64 - 1) // 16 = 3 blocks; the fourth, on the host, is there and of no use
        assert overlap(fleet, asked) == Overlap(64, 48, 48, 0, 0, 0)

    @pytest.mark.parametrize(
        ("tokens", "usable"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (63, 48), (65, 64)]
    )
    def test_usable_overlap_is_capped_one_token_before_the_end(
        self, tokens: int, usable: int, fleet: Fleet
    ) -> None:
        fleet.cache(fleet.add("w0"), prompt(1000))
        told = overlap(fleet, prompt(tokens))
        assert told.usable == usable == (tokens - 1) // 16 * 16
        assert told.raw == tokens // 16 * 16

    def test_overlap_never_crosses_a_hole(self, fleet: Fleet) -> None:
        key, asked = fleet.add("w0"), prompt(100)
        hashes = asked.prefixes(16)
        fleet.store(key, hashes[[0, 1, 3, 4]])
        assert overlap(fleet, asked).raw == 32

    def test_what_is_removed_or_cleared_overlaps_no_more(self, fleet: Fleet) -> None:
        key, asked = fleet.add("w0"), prompt(100)
        fleet.cache(key, asked)
        fleet.remove(key, asked.prefixes(16)[4:])
        assert overlap(fleet, asked).usable == 64
        fleet.clear(key)
        assert overlap(fleet, asked).usable == 0

    def test_pools_of_different_block_sizes_are_compared_in_tokens(self, fleet: Fleet) -> None:
        asked = prompt(200)
        fine, coarse = fleet.add("fine", block_size=16), fleet.add("coarse", block_size=64)
        fleet.cache(fine, asked, 112)
        fleet.cache(coarse, asked, 128)
        decision = fleet.decide(asked)
        assert {
            key.worker_id: told.usable
            for key, told in zip(decision.rows.workers, overlaps(decision), strict=True)
        } == {"fine": 112, "coarse": 128}
        assert fleet.picked(asked) == "coarse"

    def test_each_size_has_its_own_cap(self, fleet: Fleet) -> None:
        asked = prompt(128)
        fleet.cache(fleet.add("fine", block_size=16), asked)
        fleet.cache(fleet.add("coarse", block_size=64), asked)
        decision = fleet.decide(asked)
        assert [told.usable for told in overlaps(decision)] == [112, 64]
        assert [told.raw for told in overlaps(decision)] == [128, 128]

    def test_a_worker_that_has_not_told_its_block_size_overlaps_nothing(self, fleet: Fleet) -> None:
        fleet.add("w0", block_size=0)
        assert overlap(fleet, prompt(100)) == Overlap(0, 0, 0, 0, 0, 0)
        assert fleet.picked(prompt(100)) == "w0"

    def test_a_callers_hashes_find_the_workers_of_their_size_only(self, fleet: Fleet) -> None:
        tokens = pack_tokens(range(100))
        hashed = Prompt.from_hashes(block_hashes(tokens, 16), 16, 100)
        fleet.cache(fleet.add("same", block_size=16), prompt(100))
        fleet.cache(fleet.add("other", block_size=32), prompt(100))
        assert excluded(fleet, hashed) == {"other": "block size differs"}
        pick = fleet.route(hashed)
        assert pick.reservation.worker.worker_id == "same"
        assert pick.reservation.predicted_tokens == 96


class TestTrust:
    def test_a_recovering_streams_overlap_counts_half(self, fleet: Fleet) -> None:
        asked = prompt(65)
        whole, broken = fleet.add("whole"), fleet.add("broken")
        fleet.cache(whole, asked, 48)
        fleet.cache(broken, asked, 64)
        assert fleet.picked(asked) == "broken"
        fleet.tell(broken, lost=True)
        fleet.beat(broken)
        assert fleet.view.sources[broken].stream.state is StreamState.RECOVERING
        assert fleet.decide(asked).rows.overlap_tokens.tolist() == [48, 32]
        assert fleet.picked(asked) == "whole"

    def test_while_our_connection_is_down_nobodys_overlap_counts_and_all_are_routed_to(
        self, fleet: Fleet
    ) -> None:
        asked = prompt(65)
        for i in range(2):
            fleet.cache(fleet.add(f"w{i}"), asked, 64 * i)
        fleet.view.on_connection(False, fleet.now_s)
        decision = fleet.decide(asked)
        assert decision.rows.trust.tolist() == [0, 0]
        assert decision.rows.overlap_tokens.tolist() == [0, 0]
        assert decision.tied == 2, "routing goes by load"
        assert [told.usable for told in overlaps(decision)] == [0, 64], "what is known is told"

    def test_a_new_epoch_forgets_what_the_worker_held(self, fleet: Fleet) -> None:
        key, asked = fleet.add("w0"), prompt(65)
        fleet.cache(key, asked)
        fleet.now_s += 1
        fleet.add("w0")  # another life
        assert overlap(fleet, asked).raw == 0


class TestPredictions:
    def test_a_burst_of_siblings_lands_together_before_any_event(self) -> None:
        fleet = Fleet("a", "b", "c", "d", policy="dynamo-unguarded")
        siblings = [fleet.picked(prompt(400)) for _ in range(5)]
        assert len(set(siblings)) == 1
        others = {fleet.picked(prompt(400, first=10_000 * i)) for i in range(1, 20)}
        assert len(others) > 1

    def test_without_a_time_to_live_nothing_is_predicted(self) -> None:
        fleet = Fleet(predicted_ttl_s=0.0)
        key = fleet.add("a")
        fleet.cache(key, prompt(64, first=999))
        assert all(fleet.route(prompt(400)).decision.overlap(0).raw == 0 for _ in range(3))

    def test_the_receipt_tells_what_is_known_from_what_is_predicted(self, fleet: Fleet) -> None:
        key = fleet.add("a")
        fleet.cache(key, prompt(400), 160)
        fleet.route(prompt(400))
        overlap = fleet.route(prompt(400)).decision.overlap(0)
        assert overlap == Overlap(raw=400, usable=384, device=160, host=0, disk=0, predicted=224)
        assert overlap.by_events == 160

    def test_a_worker_without_events_is_known_by_our_own_picks_for_longer(self) -> None:
        fleet = Fleet()
        fleet.add("quiet", events=False)
        fleet.route(prompt(400))
        fleet.turn(60)
        assert fleet.route(prompt(400)).decision.overlap(0).predicted == 384

    def test_a_prediction_that_no_event_confirms_is_over_soon(self, fleet: Fleet) -> None:
        key = fleet.add("a")
        fleet.cache(key, prompt(64, first=999))
        fleet.route(prompt(400))
        fleet.turn(11)
        assert fleet.route(prompt(400)).decision.overlap(0).raw == 0

    def test_what_a_partial_stream_never_told_is_learned_from_reports(self, fleet: Fleet) -> None:
        key = fleet.add("a")
        fleet.cache(key, prompt(64, first=999))
        fleet.beat(key, complete=False)
        asked = fleet.route(prompt(400)).reservation
        fleet.core.fleet.view.predictions.forget(0)
        fleet.view.index.unpredict(0, 0, asked.prefixes)
        fleet.report(asked, "finished", cached_tokens=320)
        assert fleet.core.fleet.self_check.learned_blocks == 20
        assert fleet.route(prompt(400)).decision.overlap(0).predicted == 320


class TestMemory:
    @pytest.mark.parametrize(("cached_tokens", "kept"), [(None, 25), (0, 0), (384, 0)])
    def test_an_ended_reservation_keeps_hashes_only_while_a_report_may_be_checked_against_them(
        self, cached_tokens: int | None, kept: int
    ) -> None:
        fleet = Fleet("a")
        reservation = fleet.route(prompt(400)).reservation
        fleet.report(reservation, "finished", cached_tokens=cached_tokens)
        assert len(reservation.prefixes) == kept
        assert fleet.loads() == {}
