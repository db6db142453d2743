"""What `kvroute workers` prints."""

import pytest

from router.cli_fleet import show_workers
from tests.router.served import served


async def test_warnings_stand_under_the_table_word_for_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served() as stage:
        # The second looks like rich's markup, and ends a tag that nobody began.
        stage.fleet.add("w0", 1, warnings=("an odd thing", "[bold]connect[/] [errno 111] failed"))
        stage.fleet.add("w1", model="n")
        target = f"127.0.0.1:{stage.server.port}"
        assert await show_workers(target, "", as_json=False, timeout_s=5.0) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2:] == ["w0/1: an odd thing", "w0/1: [bold]connect[/] [errno 111] failed"]
