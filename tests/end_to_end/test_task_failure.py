"""A fault of ours in the background: the router drains and ends, and its log says why."""

import logging

import pytest

from router.app.processes.router_process import RouterApp
from tests.stage.loopback import serve_config


async def failing() -> None:
    raise RuntimeError("no such thing")


async def test_a_router_of_which_a_task_failed_ends_with_1_and_says_why_as_its_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = RouterApp(serve_config(None))
    app._tasks.spawn(failing(), "a task")
    assert await app.run() == 1
    first, last = (one for one in caplog.records if one.levelno == logging.CRITICAL)
    assert "background task 'a task' failed: RuntimeError: no such thing" in first.getMessage()
    assert last.getMessage() == "stopped with exit code 1: RuntimeError: no such thing"
    assert caplog.records[-1] is last
