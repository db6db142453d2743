"""Background tasks: what the log says of one that failed."""

import asyncio
import logging

import pytest

from events.plane.tasks import NAMED_MAX, Tasks, named


async def failing() -> None:
    raise RuntimeError("no such thing\nand more of it")


async def test_a_task_that_failed_has_one_line_with_its_name_and_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[BaseException] = []
    failed = asyncio.Event()

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        failed.set()

    tasks = Tasks(on_failure)
    tasks.spawn(failing(), "telling other replicas")
    await failed.wait()
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.getMessage() == (
        "this process ends, since its background task 'telling other replicas' failed:"
        " RuntimeError: no such thing"
    )
    assert record.exc_info is not None
    assert record.exc_info[1] is failures[0]


def test_an_error_without_words_is_named_by_its_class() -> None:
    assert named(TimeoutError()) == "TimeoutError"


def test_what_an_error_says_is_cut() -> None:
    assert len(named(KeyError("x" * 1000))) == NAMED_MAX
