"""Children that are spawned, and never outlive whoever started them."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from router.app.processes.router_process import RouterApp
from router.cluster.children.process import Child, end, launched, start
from router.config.keys import ConfigError
from tests.stage.loopback import serve_config
from tests.stage.waiting import until

ROOT = Path(__file__).parents[4]


def state(pid: int) -> str:
    """Of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def marked(pid: int, field: str, number: signal.Signals) -> bool:
    """Whether a process ignores a signal (SigIgn), or blocks it (SigBlk)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (one for one in lines if one.startswith(field))
    return bool(int(line.split()[1], 16) & 1 << (number - 1))


async def test_a_child_says_how_it_ended(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as output:
        process = await start(["sh", "-c", "echo out; echo err >&2; exit 7"], output)
        assert await process.wait() == 7
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    assert (process.returncode, repr(process)) == (7, f"<Child {process.pid} left with code 7>")
    process.kill()  # of a process that has ended: nothing, since its id may be another's by now
    assert await process.wait() == 7


async def test_a_program_that_is_not_there_leaves_with_127(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as output:
        process = await start([str(tmp_path / "nothing")], output)
        assert await process.wait() == 127
    assert "nothing can't be started: No such file or directory" in (tmp_path / "log").read_text()


async def test_a_child_has_a_session_of_its_own_and_signals_as_programs_expect_them() -> None:
    process = await start(["sleep", "60"], None)
    await until(
        lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes()[:5], "the program"
    )
    assert os.getsid(process.pid) == process.pid
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        assert not marked(process.pid, "SigIgn", number)
    assert not any(marked(process.pid, "SigBlk", one) for one in signal.Signals)
    process.terminate()
    assert await process.wait() == -signal.SIGTERM


async def test_a_child_that_does_not_leave_is_made_to() -> None:
    process = await start(["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"], None)

    await until(lambda: marked(process.pid, "SigIgn", signal.SIGTERM), "the trap to be set")
    await end(process, within_s=0.05)
    assert process.returncode == -signal.SIGKILL
    await end(process)


PARENT = """
import asyncio, sys
from router.cluster.children.process import start

async def main():
    process = await start(["sleep", "600"], None)
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


async def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    await until(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()[:5], "the program")
    parent.kill()
    await parent.wait()
    await until(lambda: state(pid) in ("", "Z"), "the child's end")


async def test_a_child_whose_parent_died_before_it_looked_never_begins(tmp_path: Path) -> None:
    command = launched(["touch", str(tmp_path / "begun")])
    place = command.index(str(os.getpid()))
    command[place] = "1"  # as if ours had died, and another had taken the child over
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 127
    assert not (tmp_path / "begun").exists()


async def test_nothing_of_ours_is_run_between_fork_and_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Handlers at a fork, such as gRPC's, are what a child must not run."""
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    processes: list[Child] = [await start(["true"], None) for _ in range(3)]
    assert [await one.wait() for one in processes] == [0, 0, 0]
    assert forks == []


async def test_a_child_that_can_not_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def no_room(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_room)
    with pytest.raises(OSError, match="Too many open files"):
        await start(["sleep", "60"], None)
    assert len(pids) == 1
    assert state(pids[0]) == ""
    app = RouterApp(serve_config(None))
    try:
        with pytest.raises(ConfigError, match=r"embedded NATS server can't be started.*Too many"):
            await app.start()
    finally:
        await app.stop()
    assert [state(pid) for pid in pids] == ["", ""]
