"""Faults of real processes and connections: they show, and what is lost comes back.

How soon depends on what else the machine does, so nothing here is about times: the simulation
asserts them in virtual time (tests/simulation). They are measured all the same, and printed as the
rows of a table in docs/operate.md: pytest -s -q tests/end_to_end/test_faults.py
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from tests.end_to_end.proxied_stage import BYSTANDER, ProxiedStage, a_proxied_stage
from tests.stage.waiting import until

Step = Callable[[ProxiedStage], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """What breaks, and what mends it."""

    name: str
    fault: Step
    repair: Step
    ours: bool = False
    """It is the router's own connection that suffers, and it goes on routing, by load. Otherwise
    the other worker goes on as if nothing had happened."""


async def cut_router_nats(stage: ProxiedStage) -> None:
    stage.router_nats.cut()


async def stall_router_nats(stage: ProxiedStage) -> None:
    stage.router_nats.stall()


async def heal_router_nats(stage: ProxiedStage) -> None:
    await stage.router_nats.heal()


async def cut_relay_nats(stage: ProxiedStage) -> None:
    stage.relay_nats.cut()


async def stall_relay_nats(stage: ProxiedStage) -> None:
    stage.relay_nats.stall()


async def heal_relay_nats(stage: ProxiedStage) -> None:
    await stage.relay_nats.heal()


async def cut_relay_engine(stage: ProxiedStage) -> None:
    for proxy in stage.relay_engine:
        proxy.cut()


async def stall_relay_engine(stage: ProxiedStage) -> None:
    for proxy in stage.relay_engine:
        proxy.stall()


async def heal_relay_engine(stage: ProxiedStage) -> None:
    for proxy in stage.relay_engine:
        await proxy.heal()


FAULTS = [
    Fault(
        "NATS killed (-9), restarted",
        ProxiedStage.kill_nats,
        ProxiedStage.restart_nats,
        ours=True,
    ),
    Fault("relay killed (-9), restarted", ProxiedStage.kill_relay, ProxiedStage.start_relay),
    Fault("router and NATS: cut", cut_router_nats, heal_router_nats, ours=True),
    Fault("router and NATS: stalled", stall_router_nats, heal_router_nats, ours=True),
    Fault("relay and NATS: cut", cut_relay_nats, heal_relay_nats),
    Fault("relay and NATS: stalled", stall_relay_nats, heal_relay_nats),
    Fault("relay and engine: cut", cut_relay_engine, heal_relay_engine),
    Fault("relay and engine: stalled", stall_relay_engine, heal_relay_engine),
    Fault(
        "engine killed, restarted in place", ProxiedStage.kill_engine, ProxiedStage.restart_engine
    ),
]


@pytest.fixture
def patient_connections() -> None:
    """None of these: a connection that is stalled must be given up."""


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
async def test_a_fault_shows_and_what_was_lost_comes_back(case: Fault) -> None:
    loop = asyncio.get_running_loop()
    async with a_proxied_stage() as stage:
        watch = Watch(stage, case)
        watching = asyncio.create_task(watch.run())
        began_s = loop.time()
        await case.fault(stage)
        await until(lambda: not stage.counts(), "the fault to show")
        noticed_s = loop.time() - began_s
        if not stage.engine.engine.stopped:
            await stage.work(3)  # nobody hears of it
        if case.ours:
            broker = stage.router.links.broker
            assert broker is not None
            await until(lambda: not broker.connected, "the connection to be given up")
        began_s = loop.time()
        await case.repair(stage)
        await until(lambda: stage.counts() and stage.exact(), "the worker at full trust, exact")
        live_s = loop.time() - began_s
        await stage.work(1)
        await until(stage.exact, "facts to flow again")
        watching.cancel()
        sys.stdout.write(f"| {case.name} | {noticed_s:.1f} s | {live_s:.1f} s |\n")
        assert watch.wrong == set()


class Watch:
    """Notes what must not be, for as long as it runs."""

    def __init__(self, stage: ProxiedStage, case: Fault) -> None:
        self.wrong: set[str] = set()
        self._stage = stage
        self._ours = case.ours

    async def run(self) -> None:
        while True:
            if len(self._stage.router.view.sources) < 2:
                self.wrong.add("a worker is forgotten")
                return
            if self._ours and not self._stage.routing():
                self.wrong.add("nobody gets requests")
            if not self._ours and not self._stage.counts(BYSTANDER):
                self.wrong.add("the bystander suffers")
            await asyncio.sleep(0.02)
