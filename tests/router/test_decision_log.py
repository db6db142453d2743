"""The decision log's files and its queue, at their bounds."""

from pathlib import Path
from typing import Any

import pytest

from router.config import ConfigError, DecisionLogSettings
from router.decision import Decision
from router.decision_log import QUEUE_MAX, DecisionLog, RotatedFiles
from router.logged_refusal import LoggedRefusal, decode
from router.refusals import Reason, Refusal, Refused
from router.topology import PlaceLabels
from tests.router.fleet import Fleet, prompt

LABELS = PlaceLabels("host", "rack", "cluster")


def log_of(file: Path, **settings: Any) -> DecisionLog:
    return DecisionLog(DecisionLogSettings(file=str(file), **settings), file, "here", LABELS)


@pytest.fixture
def decision() -> Decision:
    seen: list[Decision] = []
    fleet = Fleet()
    fleet.add("w0")
    fleet.core.route(fleet.request(prompt(40)), fleet.now_s, watch=seen.append)
    return seen[0]


def test_what_is_watched_is_written(tmp_path: Path, decision: Decision) -> None:
    log = log_of(tmp_path / "log")
    log.start()
    for _ in range(3):
        log.watch(decision)
    log.close()
    told = [decode(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [one.request_id for one in told] == ["request-1"] * 3
    assert log.lines == {"written": 3}


def test_refusals_are_written_between_decisions(tmp_path: Path, decision: Decision) -> None:
    log = log_of(tmp_path / "log")
    log.start()
    log.watch(decision)
    log.watch_refused(Refused(Refusal(Reason.NO_WORKER, "nobody"), 7.0, "lost"))
    log.close()
    first, second = map(decode, (tmp_path / "log").read_bytes().splitlines())
    assert not isinstance(first, LoggedRefusal)
    assert isinstance(second, LoggedRefusal)
    assert (second.request_id, second.reason) == ("lost", "NO_WORKER")
    assert log.lines == {"written": 2}


def test_what_finds_the_queue_full_is_dropped_and_counted(
    tmp_path: Path, decision: Decision
) -> None:
    log = log_of(tmp_path / "log")
    for _ in range(QUEUE_MAX + 5):  # nobody writes yet
        log.watch(decision)
    log.watch_refused(Refused(Refusal(Reason.NO_WORKER, "nobody"), 7.0))
    assert log.lines == {"dropped": 6}
    log.start()
    log.close()
    assert log.lines == {"dropped": 6, "written": QUEUE_MAX}
    assert len((tmp_path / "log").read_bytes().splitlines()) == QUEUE_MAX


def test_a_full_disk_is_counted_and_nobody_waits(decision: Decision) -> None:
    log = log_of(Path("/dev/full"))
    log.start()
    for _ in range(3):
        log.watch(decision)
    log.close()
    assert log.lines == {"failed": 3}


def test_a_file_that_cannot_be_written_stops_the_start_and_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decision_log\.file"):
        log_of(tmp_path / "no" / "folder").start()


def test_a_log_that_was_never_started_closes(tmp_path: Path) -> None:
    log_of(tmp_path / "log").close()


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
    with pytest.raises(OSError, match="fits no file"):
        files.write(b"x" * 11)
    files.write(b"x" * 10)
    files.close()
    assert contents(tmp_path) == {"log": "x" * 10}
