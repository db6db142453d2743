"""`kvroute top` on a real terminal: tmux, where it is installed, shows what the screen holds."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from indexer.kernel import NativeIndex
from tests.stage.programs import ran
from tests.stage.served import Served, asked, served
from tests.stage.waiting import DEADLINE_S

TMUX = shutil.which("tmux")
WIDTH, HEIGHT = 120, 20


class Terminal:
    """A tmux server of its own, with one window."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")

    async def run(self, *words: str) -> str:
        size = {"COLUMNS": "80", "LINES": "40"}  # of another terminal
        return (await ran(str(TMUX), "-S", self._socket, *words, env=size)).out

    async def until(self, condition: Callable[[str], bool]) -> str:
        """The screen, once it fulfils the condition."""
        shown = ""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition(shown := await self.run("capture-pane", "-p")):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # tmux has no event to await
        except TimeoutError:
            raise AssertionError(f"the screen stayed:\n{shown}") from None
        return shown


def a_fleet(stage: Served) -> None:
    stage.fleet.add("gpu-a", total_slots=4, running=3)
    stage.fleet.add("gpu-b", total_slots=4)
    stage.fleet.core.drain("gpu-b")
    stage.fleet.add("gpu-c", total_slots=4, warnings=("an odd\x1b[31m thing",))


@pytest.mark.skipif(TMUX is None, reason="tmux is not here: apt-get install tmux brings it")
async def test_the_screen_follows_a_router_and_q_leaves_it(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    async with served(index=NativeIndex()) as stage:
        a_fleet(stage)
        command = f"{Path(sys.executable).parent}/kvroute top --every 0.2 --target"
        words = [*command.split(), f"127.0.0.1:{stage.server.port}"]
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        await terminal.run("new-session", "-d", *size, *words)
        try:
            shown = await terminal.until(
                lambda text: "gpu-a" in text and "2 of 3 workers serve" in text
            )
            assert shown.index("gpu-c") < shown.index("gpu-a"), "what needs attention is first"
            await terminal.until(lambda _: bool(stage.watchers.watch))
            answer = await stage.router.Route(asked(request_id="request-7"))
            shown = await terminal.until(lambda text: "request-7" in text and "1 open" in text)
            assert answer.worker_id in shown
            stage.fleet.core.undrain("gpu-b")
            await terminal.until(lambda text: "3 of 3 workers serve" in text)
            await terminal.run("send-keys", "q")
            async with asyncio.timeout(DEADLINE_S):
                while await terminal.run("list-sessions"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # as above
        finally:
            await terminal.run("kill-server")


async def test_without_a_terminal_it_is_printed_once() -> None:
    async with served() as stage:
        a_fleet(stage)
        target = f"127.0.0.1:{stage.server.port}"
        program = Path(sys.executable).parent / "kvroute"
        code, text, _ = await ran(program, "top", "--target", target)
    assert code == 0
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("gpu-")}
    assert list(lines) == ["gpu-c", "gpu-a", "gpu-b"]
    assert "drained" in lines["gpu-b"]
    assert "an odd\\x1b[31m thing" in lines["gpu-c"]
    assert "\x1b" not in text
