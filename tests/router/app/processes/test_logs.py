"""Logs: lines for people, lines for machines, and no line a thousand times."""

import io
import json
import logging
import sys

import pytest

from router.app.processes.logs import REPEAT_S, JsonFormatter, RepeatFilter, set_up
from router.config.settings.serving_settings import LogSettings


def record(
    message: str,
    *args: object,
    level: int = logging.WARNING,
    at: float = 0.0,
    name: str = "kvroute.test",
) -> logging.LogRecord:
    made = logging.LogRecord(name, level, __file__, 1, message, args, None)
    made.created = at
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestJson:
    def line(self, made: logging.LogRecord) -> dict[str, str]:
        text = JsonFormatter().format(made)
        assert "\n" not in text
        told = json.loads(text)
        assert isinstance(told, dict)
        return told

    def test_a_line_is_one_object(self) -> None:
        made = record("worker %s forgotten", "w0/0", at=1_790_000_000.25)
        made.msecs = 250.0
        assert self.line(made) == {
            "time": "2026-09-21T14:13:20.250Z",
            "level": "warning",
            "logger": "kvroute.test",
            "message": "worker w0/0 forgotten",
        }

    def test_many_lines_and_odd_characters_stay_one_line(self) -> None:
        assert self.line(record('a "b"\nc\t\x00é'))["message"] == 'a "b"\nc\t\x00é'

    def test_an_exception_comes_with_its_traceback(self) -> None:
        try:
            raise ValueError("broken")
        except ValueError:
            made = record("failed")
            made.exc_info = sys.exc_info()
        told = self.line(made)["exception"]
        assert told.startswith("Traceback")
        assert told.endswith("ValueError: broken")


class TestRepeats:
    def test_a_line_that_was_just_said_is_held_back_and_counted(self) -> None:
        repeats = RepeatFilter()
        assert repeats.filter(record("NATS is away"))
        for i in range(5):
            assert not repeats.filter(record("NATS is away", at=i + 1.0))
        late = record("NATS is away", at=REPEAT_S)
        assert repeats.filter(late)
        assert late.getMessage() == "NATS is away (and 5 times before)"
        again = record("NATS is away", at=3 * REPEAT_S)
        assert repeats.filter(again)
        assert again.getMessage() == "NATS is away"

    def test_a_line_with_a_percent_sign_is_told_as_it_is(self) -> None:
        repeats = RepeatFilter()
        assert repeats.filter(record("%s%% full", 90))
        assert not repeats.filter(record("%s%% full", 90, at=1.0))
        late = record("%s%% full", 90, at=REPEAT_S)
        assert repeats.filter(late)
        assert late.getMessage() == "90% full (and 1 times before)"

    def test_lines_with_other_arguments_or_of_others_are_other_lines(self) -> None:
        repeats = RepeatFilter()
        assert repeats.filter(record("worker %s is gone", "a"))
        assert repeats.filter(record("worker %s is gone", "b"))
        assert repeats.filter(record("worker %s is gone", "a", name="kvroute.other"))

    def test_what_is_no_warning_is_never_held_back(self) -> None:
        repeats = RepeatFilter()
        assert all(repeats.filter(record("tick", level=logging.INFO)) for _ in range(3))

    def test_what_it_remembers_is_bounded(self) -> None:
        repeats = RepeatFilter()
        for i in range(5000):
            assert repeats.filter(record("worker %d is gone", i))
        assert len(repeats._said) == RepeatFilter._ENTRIES_MAX


class TestSetUp:
    def said(self, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **about: object) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        set_up(LogSettings(**about))  # type: ignore[arg-type]
        logging.getLogger("kvroute.test").info("hello")
        logging.getLogger("kvroute.test").debug("details")
        return stream.getvalue()

    def test_plain_on_a_terminal_and_json_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = self.said(monkeypatch, Terminal())
        assert plain.endswith("INFO    kvroute.test: hello\n")
        assert json.loads(self.said(monkeypatch, io.StringIO()))["message"] == "hello"

    def test_as_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert json.loads(self.said(monkeypatch, Terminal(), format="json"))["level"] == "info"
        assert "INFO" in self.said(monkeypatch, io.StringIO(), format="plain")

    def test_the_level_is_the_least_that_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.said(monkeypatch, Terminal(), level="warning") == ""
        assert "details" in self.said(monkeypatch, Terminal(), level="debug")


def test_names_in_plain_lines_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogSettings(format="plain"))
    logging.getLogger("kvroute").warning("worker %s:\nsecond", "w\x1b[2J\x9b\u202e")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(r"worker w\x1b[2J\x9b\u202e:")
    assert second == "second"
