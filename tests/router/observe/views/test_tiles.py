"""Tiles: the numbers of ListWorkers, and no others."""

from events.feed.stream import StreamState
from router.api.desk.worker_codec import write_worker
from router.observe.views.tiles import LATE_S, WARNINGS_MAX, standing_of, tile_of
from tests.stage.fleet import Fleet, prompt

SAME = (
    "worker_id", "dp_rank", "role", "address", "stream_complete",
    "stream_reason", "unschedulable_reason", "drained", "last_resort", "approximate", "running",
    "waiting", "reserved", "reserved_by_replicas", "block_share", "blocks_predicted",
    "prefill_tokens_active", "total_blocks",
)  # fmt: skip


def test_a_tile_has_the_numbers_of_list_workers() -> None:
    fleet = Fleet()
    key = fleet.add("a", running=3, waiting=2, used_blocks=40.0)
    fleet.add("b")
    fleet.cache(key, prompt(256))
    fleet.route(prompt(512))
    for source in fleet.view.sources.values():
        tile = tile_of(source, fleet.core, fleet.now_s)
        status = write_worker(source, fleet.core, fleet.now_s)
        for name in SAME:
            assert getattr(tile, name) == getattr(status, name), name
        assert tile.stream_state == status.stream_state
        assert tile.model == status.model
        assert tile.slots == status.total_slots
        assert tile.active_blocks == status.active_blocks
        assert tile.blocks_held == status.blocks_device + status.blocks_host + status.blocks_disk
        assert [sentence for _, sentence in tile.warnings] == list(status.warnings)


def test_a_tile_at_rest_does_not_change_with_the_age_of_its_beat() -> None:
    fleet = Fleet()
    fleet.add("a")
    (source,) = fleet.view.sources.values()
    assert tile_of(source, fleet.core, fleet.now_s) == tile_of(
        source, fleet.core, fleet.now_s + LATE_S - 0.1
    )
    assert tile_of(source, fleet.core, fleet.now_s + 2.5).beat_late_s == 2


def test_warnings_past_the_bound_are_counted() -> None:
    fleet = Fleet()
    fleet.add("a", warnings=tuple(f"fault {i}" for i in range(WARNINGS_MAX + 3)))
    (source,) = fleet.view.sources.values()
    tile = tile_of(source, fleet.core, fleet.now_s)
    assert len(tile.warnings) == WARNINGS_MAX
    assert tile.warnings_left_out == 3


def test_a_standing_is_drained_before_it_is_anything_else() -> None:
    fleet = Fleet()
    key = fleet.add("a")
    fleet.add("b")
    source = fleet.view.sources[key]
    assert standing_of(source, fleet.core)[0] == StreamState.LIVE
    fleet.turn(5.0, silent=[key])
    assert standing_of(source, fleet.core)[0] == StreamState.SILENT
    fleet.core.drain("a")
    assert standing_of(source, fleet.core) == ("drained", "")
