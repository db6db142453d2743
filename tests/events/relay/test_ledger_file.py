"""A rank's saved ledger: what is written when, and that no disk ends a relay."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.plane.supervisor import Supervisor
from events.relay import ledger_file as module
from events.relay.ledger_file import LedgerSaver, pause_s, read_file, saved_ledger_path, write_file
from events.relay.rank import Rank
from events.relay.saved_ledger import Source, unpack
from indexer.identity import WorkerKey
from tests.events.relay.one_rank import NOW_S, Engine, following
from tests.stage.waiting import until

SOURCE = Source(WorkerKey("w", 0), "vllm", 4)


class Kept:
    """Savers of one file, and what they counted."""

    def __init__(self, folder: Path) -> None:
        self.path = saved_ledger_path(folder, "f", SOURCE.worker)
        self.counts: Counter[str] = Counter()
        self.tasks = Supervisor("w", random.Random(1))

    def saver(self, rank: Rank) -> LedgerSaver:
        return LedgerSaver(self.path, SOURCE, rank, lambda: NOW_S, self.counts)

    async def keep(self, engine: Engine) -> None:
        """A whole life of a saver."""
        saver = self.saver(Engine().rank)
        saver._rank = engine.rank
        saver.start(self.tasks)
        await saver.finish()

    async def resumed(self) -> Rank:
        rank = Engine().rank
        await self.saver(rank).resume()
        return rank

    def held(self) -> int:
        """Blocks in the file; 0 without one."""
        return unpack(SOURCE, self.path.read_bytes())[1].count() if self.path.exists() else 0


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    assert not kept.tasks.failures


async def test_what_was_written_at_the_end_is_read_at_the_next_start(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await kept.keep(following(5))
    rank = await kept.resumed()
    assert rank._kept is not None
    assert "has 5 placements after engine message 4" in caplog.text
    assert "<" not in caplog.text
    checkpoint, ledger = rank._kept
    assert (checkpoint.seq, checkpoint.complete, ledger.count()) == (4, True, 5)
    assert not kept.counts


async def test_without_a_file_a_rank_starts_from_nothing(kept: Kept) -> None:
    assert (await kept.resumed())._kept is None
    assert not kept.counts


async def test_a_ledger_is_written_now_and_then_if_it_changed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_S", 0.001)
    engine = following(5)
    saver = kept.saver(engine.rank)
    saver.start(kept.tasks)
    engine.hear(5)
    await until(lambda: kept.held() == 6, "the first file")
    inode = kept.path.stat().st_ino
    engine.hear(6)
    await until(lambda: kept.held() == 7, "the next one")
    assert kept.path.stat().st_ino != inode
    inode = kept.path.stat().st_ino
    await saver.finish()
    assert kept.path.stat().st_ino == inode, "nothing was new"


async def test_a_rank_that_heard_nothing_leaves_the_file_alone(kept: Kept) -> None:
    await kept.keep(following(5))
    engine = Engine()
    saver = kept.saver(engine.rank)
    await saver.resume()
    saver.start(kept.tasks)
    engine.perform(engine.rank.on_process_start(NOW_S - 1, NOW_S))
    await saver.finish()
    assert kept.held() == 5


def test_a_file_that_took_long_is_written_less_often() -> None:
    assert [pause_s(took_s) for took_s in (0.0, 0.5, 3.0)] == [30.0, 30.0, 150.0]


async def test_a_torn_file_is_counted_and_ignored(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    await kept.keep(following(5))
    whole = kept.path.read_bytes()
    kept.path.write_bytes(whole[:-1])
    assert (await kept.resumed())._kept is None
    assert kept.counts == {"ledger_unusable": 1}
    assert "the checksum" in caplog.text
    await kept.keep(following(6))
    assert kept.held() == 6, "and replaced by the next one"


async def test_a_file_that_cannot_be_read_is_counted_and_ignored(kept: Kept) -> None:
    kept.path.mkdir()
    assert (await kept.resumed())._kept is None
    assert kept.counts == {"ledger_unusable": 1}


async def test_a_disk_that_fails_is_counted_and_tried_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "KEEP_S", 0.001)
    kept.path.mkdir()  # nothing can take its name
    engine = following(5)
    saver = kept.saver(engine.rank)
    engine.hear(5)
    saver.start(kept.tasks)
    await until(lambda: kept.counts["ledger_not_saved"] > 1, "two failures")
    kept.path.rmdir()
    await until(lambda: kept.held() == 6, "the file")
    await saver.finish()
    assert "can't write" in caplog.text


async def test_a_file_is_bounded(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.keep(following(5))
    monkeypatch.setattr(module, "FILE_BYTES_MAX", kept.path.stat().st_size)
    assert (await kept.resumed())._kept is not None
    await kept.keep(following(9))
    assert (kept.counts, kept.held()) == ({"ledger_not_saved": 1}, 5)
    monkeypatch.setattr(module, "FILE_BYTES_MAX", kept.path.stat().st_size - 1)
    assert (await kept.resumed())._kept is None
    assert kept.counts["ledger_unusable"] == 1


def test_a_write_that_died_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.w.0-1.ledger"
    write_file(path, b"old")
    path.with_suffix(".new").write_bytes(b"half of the n")
    assert read_file(path) == b"old"
    write_file(path, b"new")
    assert read_file(path) == b"new"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_every_rank_of_every_worker_has_a_name_of_its_own(tmp_path: Path) -> None:
    ids = ["a", "a.0", "a/../b", "ü" * 256, "ü" * 255 + "u", "A"]
    paths = {
        saved_ledger_path(tmp_path, fleet, WorkerKey(worker, rank))
        for worker in ids
        for rank in (0, 1, 10)
        for fleet in ("f", "f-a")
    }
    assert len(paths) == 6 * 3 * 2
    assert len({path.name.lower() for path in paths}) == len(paths)
    for path in paths:
        assert path.parent == tmp_path
        path.write_bytes(b"")
