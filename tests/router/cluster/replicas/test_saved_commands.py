"""The fleet commands in force, through a router's restart."""

import asyncio
import os
import secrets
import threading
from pathlib import Path

import pytest

from events.plane.facts import VERSION, Control
from events.relay.ledger_file import write_file
from router.app.processes.router_process import RouterApp
from router.cluster.replicas import saved_commands
from router.cluster.replicas.fleet_commands import FleetCommands
from router.cluster.replicas.saved_commands import FleetState
from router.config.keys import ConfigError
from router.config.settings.fleet_settings import FleetSettings
from tests.stage.fleet import Fleet
from tests.stage.loopback import serve_config


def a_life(path: Path, fleet_name: str = "default") -> tuple[Fleet, FleetCommands, FleetState]:
    """A router's process, up to where it hears of its workers."""
    fleet = Fleet(replica=f"here-{secrets.token_hex(4)}")
    commands = FleetCommands(fleet.core, fleet.clock)
    state = FleetState(path, fleet_name, commands)
    state.restore()
    fleet.add("w0")
    fleet.add("w1")
    return fleet, commands, state


async def test_drains_and_removals_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state"
    _, commands, state = a_life(path)
    commands.apply(commands.give("drain", "w0"))
    commands.apply(commands.give("remove", "w1", 60.0))
    assert await state.keep()
    again, commands, state = a_life(path)
    assert list(again.core.fleet.drained) == ["w0"]
    assert again.view.ranks("w1") == []
    assert commands.removed("w1")
    commands.apply(commands.give("undrain", "w0"))
    commands.apply(commands.give("undrain", "w1"))
    assert await state.keep()
    third, _, state = a_life(path)
    assert third.core.fleet.drained == {}
    assert len(third.view.ranks("w1")) == 1
    assert state.counts == {"read": 1}


async def test_what_comes_in_is_written_without_a_caller_who_waits(tmp_path: Path) -> None:
    path = tmp_path / "state"
    _, commands, state = a_life(path)
    task = asyncio.create_task(state.run())
    commands.apply(Control(VERSION, "r2-1", "drain", "w0"))
    while not path.exists() or b"drain" not in path.read_bytes():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()


async def test_many_commands_at_once_share_writes(tmp_path: Path) -> None:
    _, commands, state = a_life(tmp_path / "state")
    for i in range(20):
        commands.apply(commands.give("undrain" if i % 2 else "drain", "w0"))
    assert all(await asyncio.gather(*(state.keep() for _ in range(20))))
    assert state.counts["written"] == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        b"\xff\xfe",
        b'{"version":1,"fleet":"default","comm',
        b"[" * 100_000,
        b'{"version":2,"fleet":"default","commands":[]}',
        b'{"version":1,"fleet":"another","commands":[]}',
        b'{"version":1,"fleet":"default","commands":[{"v":1,"id":"a","action":"drain"}]}',
    ],
)
async def test_a_file_that_cannot_be_read_ends_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    fleet, commands, state = a_life(path)
    assert state.counts == {"unreadable": 1}
    assert fleet.core.fleet.drained == {}
    commands.apply(commands.give("drain", "w0"))
    assert await state.keep()
    again, _, _ = a_life(path)
    assert list(again.core.fleet.drained) == ["w0"]


async def test_a_disk_that_refuses_is_counted_and_the_next_write_has_all(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    _, commands, state = a_life(folder / "state")
    folder.rmdir()
    commands.apply(commands.give("drain", "w0"))
    assert not await state.keep()
    assert state.counts == {"write_failed": 1}
    folder.mkdir()
    assert await state.keep()
    again, _, _ = a_life(folder / "state")
    assert list(again.core.fleet.drained) == ["w0"]


@pytest.mark.parametrize("name", ["", "missing/state"])
def test_a_file_that_cannot_be_is_refused_with_its_key(tmp_path: Path, name: str) -> None:
    path = os.fspath(tmp_path / name)
    config = serve_config("nats://127.0.0.1:1", fleet=FleetSettings(state_file=path))
    with pytest.raises(ConfigError, match=r"fleet\.state_file"):
        RouterApp(config)


async def test_a_write_whose_caller_has_gone_ends_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, commands, state = a_life(tmp_path / "state")
    begun, released = threading.Event(), threading.Event()
    happened: list[str] = []

    def write(path: Path, content: bytes) -> None:
        happened.append("begin")
        if not begun.is_set():
            begun.set()
            released.wait(30.0)
        write_file(path, content)
        happened.append("end")

    monkeypatch.setattr(saved_commands, "write_file", write)
    commands.apply(commands.give("drain", "w0"))
    first = asyncio.create_task(state.keep())
    assert await asyncio.to_thread(begun.wait, 30.0)
    first.cancel()
    commands.apply(commands.give("undrain", "w0"))
    second = asyncio.create_task(state.keep())
    for _turn in range(10):
        await asyncio.sleep(0)
    released.set()
    assert await second
    assert first.cancelled()
    assert happened == ["begin", "end", "begin", "end"]
    again, _, _ = a_life(tmp_path / "state")
    assert again.core.fleet.drained == {}
