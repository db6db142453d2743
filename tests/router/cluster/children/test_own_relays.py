"""Which relays of a router run at once: with a child process that ends them when the test does."""

import asyncio
import random

import pytest

from events.plane.settings import EngineSettings
from router.cluster.children.own_relays import OwnRelays
from router.cluster.children.relay_messages import Command, Opening, RelayState

ENGINE = EngineSettings(id="w0", engine="vllm", address="http://w0", events="tcp://w0:5557")


class Child:
    """Notes the starts of relays."""

    def __init__(self) -> None:
        self.ends: list[asyncio.Future[str]] = []
        self.states: dict[int, RelayState] = {}

    def begin(self, _number: int, _settings: EngineSettings) -> "asyncio.Future[str]":
        self.ends.append(asyncio.get_running_loop().create_future())
        return self.ends[-1]

    def send(self, command: Command) -> None: ...

    def end_all(self) -> None:
        for end in self.ends:
            if not end.done():
                end.set_result("")


async def turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def opening() -> Opening:
    raise AssertionError("no process is started")


@pytest.mark.parametrize("flaps", [0, 1, 2])
async def test_a_relay_begins_once_all_earlier_ones_of_its_worker_have_ended(
    flaps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child()

    async def up(_: OwnRelays) -> Child:
        return child

    monkeypatch.setattr(OwnRelays, "_up", up)
    relays = OwnRelays(opening, clock=lambda: 0.0, rng=random.Random(7))
    relays.start(ENGINE, registered=False)
    await turns()
    try:
        for _ in range(flaps + 1):
            relays.leave("w0", "other_relay")
            await turns()
            relays.start(ENGINE, registered=False)
            await turns()
        assert len(child.ends) == 1, "the first one has not ended"
        child.end_all()
        await turns()
        assert len(child.ends) == 2
    finally:
        child.end_all()
        await relays.stop()
