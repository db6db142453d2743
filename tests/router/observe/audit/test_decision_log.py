"""The decision log's files and its queue, at their bounds."""

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config.keys import ConfigError
from router.config.settings.serving_settings import DecisionLogSettings
from router.decide.decision.decision import Decision
from router.observe.audit.decision_log import QUEUE_MAX, SWITCHES_MAX, DecisionLog, RotatedFiles
from router.observe.audit.logged_refusal import LoggedRefusal, decode
from router.request.refusal import Reason, Refusal, Refused
from tests.stage.fleet import Fleet, prompt


async def log_of(file: Path, **about: Any) -> DecisionLog:
    log = DecisionLog("here")
    await log.use(DecisionLogSettings(file=str(file), **about))
    return log


class Held:
    """A log whose thread stands still until it is let go."""

    def __init__(self, log: DecisionLog, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go = Event()
        is_there = Event()
        write = RotatedFiles.write

        def held(files: RotatedFiles, line: bytes) -> None:
            is_there.set()
            assert self._may_go.wait(30.0)
            write(files, line)

        monkeypatch.setattr(RotatedFiles, "write", held)
        log.watch_refused(LOST)
        assert is_there.wait(30.0)

    def let_go(self) -> None:
        self._may_go.set()


LOST = Refused(Refusal(Reason.NO_WORKER, "nobody"), 7.0, "lost")


@pytest.fixture
def decision() -> Decision:
    seen: list[Decision] = []
    fleet = Fleet()
    fleet.add("w0")
    fleet.core.route(fleet.request(prompt(40)), fleet.now_s, watch=seen.append)
    return seen[0]


async def test_refusals_are_written_between_decisions(tmp_path: Path, decision: Decision) -> None:
    log = await log_of(tmp_path / "log")
    log.watch(decision)
    log.watch_refused(LOST)
    log.close()
    first, second = map(decode, (tmp_path / "log").read_bytes().splitlines())
    assert not isinstance(first, LoggedRefusal)
    assert isinstance(second, LoggedRefusal)
    assert (second.request_id, second.reason) == ("lost", "NO_WORKER")
    assert log.lines == {"written": 2}


async def test_what_finds_the_queue_full_is_dropped_and_counted(
    tmp_path: Path, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await log_of(tmp_path / "log")
    held = Held(log, monkeypatch)
    for _ in range(QUEUE_MAX + 5):
        log.watch(decision)
    log.watch_refused(LOST)
    assert log.lines == {"dropped": 6}
    held.let_go()
    log.close()
    assert log.lines == {"dropped": 6, "written": QUEUE_MAX + 1}
    assert len((tmp_path / "log").read_bytes().splitlines()) == QUEUE_MAX + 1


def ids(file: Path) -> list[str]:
    """Of the lines of a file; none if it is not there."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [decode(line).request_id for line in lines]


async def test_lines_go_to_the_file_that_was_configured_when_they_were_made(
    tmp_path: Path, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await log_of(tmp_path / "log", max_mib=1)
    held = Held(log, monkeypatch)
    for changed in (
        DecisionLogSettings(file=str(tmp_path / "other")),
        DecisionLogSettings(),
        DecisionLogSettings(file=str(tmp_path / "log"), max_mib=2),
    ):
        await log.use(changed)
        assert log.is_on == (changed.file is not None)
        if log.is_on:
            log.watch(decision)
    held.let_go()
    log.close()
    assert ids(tmp_path / "other") == ["request-1"]
    assert ids(tmp_path / "log") == ["lost", "request-1"]
    assert log.lines == {"written": 3}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["to a", "to b", "to b, smaller", "nowhere", "line"]), max_size=25))
async def test_whatever_changes_each_line_is_where_it_belongs_and_in_order(
    steps: list[str],
) -> None:
    with TemporaryDirectory() as folder:
        a, b = Path(folder, "a"), Path(folder, "b")
        places = {
            "to a": DecisionLogSettings(file=str(a)),
            "to b": DecisionLogSettings(file=str(b)),
            "to b, smaller": DecisionLogSettings(file=str(b), max_mib=1),
            "nowhere": DecisionLogSettings(),
        }
        log = DecisionLog("here")
        wanted: dict[str, list[str]] = {str(a): [], str(b): []}
        current, switches = DecisionLogSettings(), 0
        for i, step in enumerate(steps):
            if step != "line":
                switches += places[step] != current
                if switches > SWITCHES_MAX:
                    continue  # the disk may be that slow
                current = places[step]
                await log.use(current)
            elif current.file is not None:
                log.watch_refused(Refused(Refusal(Reason.NO_WORKER, "nobody"), 7.0, str(i)))
                wanted[current.file].append(str(i))
        log.close()
        assert {name: ids(Path(name)) for name in wanted} == wanted
        assert log.lines["written"] == sum(map(len, wanted.values()))


async def test_another_share_changes_no_file(tmp_path: Path, decision: Decision) -> None:
    log = await log_of(tmp_path / "log", share=0.1)
    log.watch(decision)
    await log.use(DecisionLogSettings(file=str(tmp_path / "log"), share=0.5, hashes=True))
    log.watch(decision)
    log.close()
    first, second = (decode(line) for line in (tmp_path / "log").read_bytes().splitlines())
    assert not isinstance(first, LoggedRefusal)
    assert not isinstance(second, LoggedRefusal)
    assert (first.prefixes is None, second.prefixes is None) == (True, False)


async def test_a_change_that_cannot_be_leaves_the_log_as_it_was(
    tmp_path: Path, decision: Decision
) -> None:
    log = await log_of(tmp_path / "log")
    with pytest.raises(ConfigError, match=r"decision_log\.file"):
        await log.use(DecisionLogSettings(file=str(tmp_path / "no" / "folder")))
    log.watch(decision)
    log.close()
    assert ids(tmp_path / "log") == ["request-1"]


async def test_more_changes_than_a_hanging_disk_can_follow_are_refused(
    tmp_path: Path, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await log_of(tmp_path / "log")
    held = Held(log, monkeypatch)
    for _ in range(QUEUE_MAX):
        log.watch(decision)
    for i in range(SWITCHES_MAX):
        await log.use(DecisionLogSettings(file=str(tmp_path / f"log-{i}")))
    with pytest.raises(ConfigError, match="takes no writes"):
        await log.use(DecisionLogSettings())
    assert log.is_on
    held.let_go()
    log.close()
    assert log.lines == {"written": QUEUE_MAX + 1}


async def test_nothing_waits_for_a_file_that_is_opened(tmp_path: Path) -> None:
    """A FIFO without a reader can't be opened, as a file of a server that is gone."""
    log, hangs = await log_of(tmp_path / "log"), tmp_path / "hangs"
    os.mkfifo(hangs)
    settings = DecisionLogSettings(file=str(hangs))
    openings = [asyncio.ensure_future(log.use(settings)) for _ in range(SWITCHES_MAX)]
    other = DecisionLogSettings(file=str(tmp_path / "other"))
    await asyncio.sleep(0)
    openings[0].cancel()
    with pytest.raises(ConfigError, match="takes no writes"):
        await log.use(other)
    with hangs.open("rb"):
        ends = await asyncio.gather(*openings, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert all(isinstance(end, ConfigError) for end in ends[1:]), "a FIFO is no file"
    await log.use(other)
    log.watch_refused(LOST)
    log.close()
    assert ids(tmp_path / "other") == ["lost"]


async def test_a_full_disk_is_counted_and_nobody_waits(decision: Decision) -> None:
    log = await log_of(Path("/dev/full"))
    for _ in range(3):
        log.watch(decision)
    log.close()
    assert log.lines == {"failed": 3}


async def test_a_file_that_cannot_be_written_stops_the_start_and_names_the_key(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"decision_log\.file"):
        await log_of(tmp_path / "no" / "folder")


def test_a_log_that_was_never_used_closes() -> None:
    log = DecisionLog("here")
    log.close()
    log.close()
    assert log.lines == {}
    assert not log.is_on


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_files_are_rotated_by_size_and_bounded_in_number(tmp_path: Path) -> None:
    files = RotatedFiles(tmp_path / "log", 10, 3)
    for i in range(9):
        files.write(f"aa{i}\n".encode())
        assert all(len(text) <= 10 for text in contents(tmp_path).values())
    files.close()
    assert contents(tmp_path) == {
        "log": "aa8\n",
        "log.1": "aa6\naa7\n",
        "log.2": "aa4\naa5\n",
    }


def test_one_file_begins_anew(tmp_path: Path) -> None:
    files = RotatedFiles(tmp_path / "log", 10, 1)
    for i in range(3):
        files.write(f"aa{i}\n".encode())
    files.close()
    assert contents(tmp_path) == {"log": "aa2\n"}


def test_a_file_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("aa0\n")
    files = RotatedFiles(tmp_path / "log", 10, 2)
    files.write(b"aa1\n")
    files.write(b"aa2\n")
    files.close()
    assert contents(tmp_path) == {"log": "aa2\n", "log.1": "aa0\naa1\n"}


def test_a_line_that_fits_no_file_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    files = RotatedFiles(tmp_path / "log", 10, 2)
    with pytest.raises(OSError, match="more than a file may have"):
        files.write(b"x" * 11)
    files.write(b"x" * 10)
    files.close()
    assert contents(tmp_path) == {"log": "x" * 10}
