"""One run: a stage, traffic, faults as planned, quiet; what was observed.

start - warm-up - faults - mended - clients stop - quiet until all holds, or for its whole time
"""

import asyncio
import os
import random
import resource
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.late import LINE
from tests.chaos.laws import AWAY, settled
from tests.chaos.machine import watched
from tests.chaos.records import Cause, Ended, Observed, Resident, Served, Trouble, read
from tests.chaos.schedule import Fault, plan
from tests.chaos.stage import (
    Child,
    Options,
    Stage,
    a_stage,
    all_in_use,
    start_clients,
    stop_clients,
    until,
    until_seen,
)
from tests.stage.processes import cpu_s, resident_bytes
from tests.stage.proxy import Proxy
from tests.stage.waiting import accepts

CORRUPT_SHARE = 0.02
"""Of the pieces that a corrupting proxy passes."""
SLOW_BYTES_PER_S = 20_000
WEIGHED_S = 5.0
"""Between two looks at a router's memory."""
_UNDRAINS_MAX = 20
STANDARD_FILES = 3
"""Descriptors that every process has: no further one is opened under such a limit."""
DISK_BYTES = 1
"""Of any file, while the disk is full."""
_MODES = {
    Cause.HANG: "hang",
    Cause.ERRORS: "errors",
    Cause.HALF: "half",
    Cause.PAGES: "pages",
    Cause.REUSE: "reuse",
}


@dataclass(frozen=True)
class Times:
    """How long the parts of a run take, in seconds."""

    warm_up: float = 60.0
    faults: float = 480.0
    every: float = 3.0
    """Between two faults, on average."""
    longest: float = 20.0
    """Fault."""
    mended: float = 3.0
    """Traffic after the last fault."""
    quiet: float = 60.0
    waits: bool = True
    """Whether the quiet has its whole time; if not, it ends when every law holds."""


async def run(
    options: Options,
    times: Times,
    folder: Path,
    note: Callable[[str], object],
    faults: Sequence[Fault] | None = None,
) -> Observed:
    """faults: absent, they are drawn. Raises AssertionError when the stage does not come up."""
    async with a_stage(options, folder) as stage:
        await start_clients(stage)
        note(f"{len(stage.children)} processes are up; warm-up for {times.warm_up:g} s")
        began_s, cpu_before = time.monotonic(), cpu_of(stage)
        await asyncio.sleep(times.warm_up)
        from_s = time.monotonic()
        used = cores(cpu_before, cpu_of(stage), from_s - began_s)
        warm = [one.quiet for one in await stage.seen()]
        player = Player(stage, note)
        if faults is None:
            rng = random.Random(f"{options.seed}/faults")
            faults = plan(rng, times.faults, times.every, options.sizes, times.longest)
        async with watched(player.troubles), weighed(stage, began_s) as resident:
            await player.play(faults)
            await asyncio.sleep(times.mended)
            to_s = time.monotonic()
            counted = await stop_clients(stage)
        note(f"quiet for {'' if times.waits else 'at most '}{times.quiet:g} s")

        async def observed() -> Observed:
            seen = [] if _router_is_gone(stage) else await stage.seen(warm)
            return Observed(
                served=served,
                troubles=tuple(player.troubles),
                ended=(*player.ended, *stage.ended()),
                engines=await stage.held(),
                routers=tuple(seen),
                clients=options.sizes.clients,
                router_count=options.sizes.routers,
                from_s=from_s,
                to_s=to_s,
                attempts=options.attempts,
                resident=tuple(resident),
                notes=_notes(served, counted, to_s - began_s) | used,
            )

        files = [folder / f"{client.name}.jsonl" for client in stage.clients]
        served = tuple(one for file in files for one in read(file, Served))
        return await _after_quiet(observed, times)


async def _after_quiet(observed: Callable[[], Awaitable[Observed]], times: Times) -> Observed:
    until_s = time.monotonic() + times.quiet
    if times.waits:
        await asyncio.sleep(times.quiet)
    while True:
        found = await observed()
        if settled(found) or times.waits or time.monotonic() > until_s:
            return found
        await asyncio.sleep(0.25)


@asynccontextmanager
async def weighed(stage: Stage, began_s: float) -> AsyncIterator[list[Resident]]:
    """The routers' resident memory while the block runs."""
    looks: list[Resident] = []

    async def weigh() -> None:
        while True:
            for router in stage.routers:
                with suppress(FileNotFoundError):  # it has ended, which the player notes
                    size = resident_bytes(router.pid)
                    looks.append(Resident(router.name, time.monotonic() - began_s, size))
            await asyncio.sleep(WEIGHED_S)

    task = asyncio.create_task(weigh())
    try:
        yield looks
    finally:
        task.cancel()


def cpu_of(stage: Stage) -> dict[tuple[str, int], float]:
    """(kind, pid) -> CPU time, of each process that is there, and of this one with its proxies."""
    kinds = {child.pid: child.kind for child in stage.children}
    found = {("proxies", os.getpid()): cpu_s(os.getpid())}
    for pid, kind in kinds.items():
        with suppress(FileNotFoundError):  # it has ended, which the player notes
            found[kind, pid] = cpu_s(pid)
    return found


def cores(
    before: dict[tuple[str, int], float], after: dict[tuple[str, int], float], seconds: float
) -> dict[str, float]:
    """Of each kind, what those took that were there all the time."""
    found: Counter[str] = Counter()
    for kind, pid in before.keys() & after.keys():
        found[kind] += (after[kind, pid] - before[kind, pid]) / seconds
    return {f"cores of {kind}": used for kind, used in sorted(found.items())}


def _router_is_gone(stage: Stage) -> bool:
    return any(one.kind == "router" for one in stage.ended())


class Player:
    """Does what the plan says, and notes when."""

    def __init__(self, stage: Stage, note: Callable[[str], object]) -> None:
        self.troubles: list[Trouble] = []
        self.ended: list[Ended] = []
        """Processes that ended by themselves and were started again."""
        self._stage = stage
        self._note = note
        self._rng = random.Random(f"{stage.options.seed}/player")
        self._began_s = 0.0
        self._engine = [asyncio.Lock() for _ in stage.engines]
        """Held by the fault that an engine has: on a busy machine they last longer than planned."""
        self._sick = 0
        """Workers that have a fault."""
        self._healed = asyncio.Condition()
        self._routers = asyncio.Lock()
        """Held while a router is stopped, or a worker drained: what is stopped takes no undrain."""

    async def play(self, faults: Sequence[Fault]) -> None:
        """Returns when the last fault is mended."""
        self._began_s = time.monotonic()
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    await asyncio.sleep(self._began_s + fault.at_s - time.monotonic())
                    group.create_task(self._perform(fault))
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Starts again what ended by itself, so that the run can go on, and notes it."""
        while True:
            await asyncio.sleep(0.5)
            for one in self._stage.ended():
                self.ended.append(one)
                self._note(f"        {one.process} ended by itself with code {one.code}")
                child = next(it for it in self._stage.children if it.name == one.process)
                self._note(textwrap.indent(child.log_end(), " " * 12))
                child.wanted = False
                if child.kind in {"router", "relay", "nats"}:
                    await child.start(answers=False)
                if child.kind == "router":
                    i = self._stage.routers.index(child)
                    await self._until_router(i, Cause.ROUTER, time.monotonic() - 1.0)

    async def _until_router(self, i: int, cause: Cause, from_s: float) -> None:
        """Notes that a router is not there, until it listens."""
        await until(lambda: accepts(self._stage.router_ports[i]), "a router to listen")
        self._had(Trouble(cause=cause, from_s=from_s, to_s=time.monotonic(), router=i))

    async def _end_routers(self, fault: Fault) -> None:
        """All at once by SIGKILL; or one after the other, in order, as a rolling restart does."""
        routers = [(i, self._stage.routers[i]) for i in fault.routers]
        from_s = time.monotonic()
        if fault.cause is Cause.ROUTER:
            await asyncio.gather(*(router.kill() for _, router in routers))
            await asyncio.sleep(fault.for_s)
        for i, router in routers:
            if fault.cause is Cause.ROLLING:
                from_s = time.monotonic()
                await router.end()
            await router.start(answers=False)
            await self._until_router(i, fault.cause, from_s)
            if fault.cause is Cause.ROLLING:
                await until_seen(self._stage, all_in_use, "a new router to know all workers")

    async def _perform(self, fault: Fault) -> None:
        async with AsyncExitStack() as stack:
            for i in sorted(fault.workers):
                await stack.enter_async_context(self._engine[i])
            if fault.cause in {Cause.ROUTER_STOP, Cause.DRAIN}:
                await stack.enter_async_context(self._routers)
            await stack.enter_async_context(self._leaving_enough_well(len(fault.workers)))
            await self._perform_alone(fault)

    @asynccontextmanager
    async def _leaving_enough_well(self, count: int) -> AsyncIterator[None]:
        """Waits until so many more workers may have a fault: those that start again may take
        longer than planned, and one worker can't serve what is sent to eight."""
        sizes = self._stage.options.sizes
        async with self._healed:
            await self._healed.wait_for(
                lambda: not self._sick or self._sick + count <= sizes.workers - sizes.well
            )
            self._sick += count
        try:
            yield
        finally:
            async with self._healed:
                self._sick -= count
                self._healed.notify_all()

    async def _perform_alone(self, fault: Fault) -> None:
        from_s = time.monotonic()
        names = [f"worker-{i}" for i in fault.workers]
        if fault.cause in LINE | AWAY:
            names = [f"router-{i}" for i in fault.routers]
        if fault.cause in LINE:
            names.append(f"client-{fault.client}")
        self._note(
            f"{from_s - self._began_s:7.1f} {fault.cause.value} for {fault.for_s:.1f} s:"
            f" {', '.join(names)}"
        )
        match fault.cause:
            case Cause.ROUTER | Cause.ROLLING:
                await self._end_routers(fault)
            case Cause.KILL | Cause.RESTART:
                await asyncio.gather(*(self._kill(i, fault) for i in fault.workers))
            case Cause.STOP:
                await self._stop([self._stage.engines[i] for i in fault.workers], fault)
            case Cause.ROUTER_STOP:
                await self._stop([self._stage.routers[i] for i in fault.routers], fault)
            case Cause.HANG | Cause.ERRORS | Cause.HALF | Cause.PAGES | Cause.REUSE:
                await self._fail(fault)
            case Cause.DESCRIPTORS:
                await self._take_descriptors(fault)
            case Cause.RELAY:
                await self._kill_relay(fault)
            case Cause.WIRE_CUT | Cause.WIRE_SLOW | Cause.WIRE_CORRUPT:
                await self._break_wires(fault)
            case Cause.LINE_CUT | Cause.LINE_SLOW | Cause.LINE_CORRUPT:
                lines = [self._stage.lines[fault.client, i] for i in fault.routers]
                await self._break(lines, fault)
            case Cause.NATS:
                await self._kill_nats(fault)
            case Cause.DISK:
                await self._fill_disk(fault)
            case Cause.FLOOD:
                await self._tell_hostile(flood=fault.for_s)
            case Cause.DRAIN:
                await self._drain(fault)
        to_s = time.monotonic()
        of: list[dict[str, object]] = [{"worker": f"worker-{i}"} for i in fault.workers] or [{}]
        if fault.cause in LINE:
            of = [{"client": fault.client, "router": i} for i in fault.routers]
        if fault.cause in {Cause.ROUTER_STOP, Cause.DESCRIPTORS}:
            of = [{"router": i} for i in fault.routers]
        for fields in of:
            if fault.cause not in {Cause.KILL, Cause.RESTART, Cause.ROUTER, Cause.ROLLING}:
                self._had(Trouble(cause=fault.cause, from_s=from_s, to_s=to_s, **fields))  # type: ignore[arg-type]

    def _had(self, trouble: Trouble) -> None:
        self.troubles.append(trouble)

    async def _kill(self, i: int, fault: Fault) -> None:
        engine = self._stage.engines[i]
        from_s = time.monotonic()
        if fault.cause is Cause.RESTART:
            await engine.end()
        else:
            await engine.kill()
        # A restart ends in order first. What is killed fails its requests before its end is seen.
        dead_s = time.monotonic() if fault.cause is Cause.RESTART else from_s
        await asyncio.sleep(fault.for_s)
        try:
            listens = asyncio.create_task(self._when_it_listens(i))
            await engine.start(answers=True)
        finally:
            # Dead is what refuses: neither what still ends in order, nor what already listens.
            to_s = await listens
        name = engine.name
        if fault.cause is Cause.RESTART:
            self._had(Trouble(cause=Cause.ERRORS, from_s=from_s, to_s=dead_s, worker=name))
        self._had(Trouble(cause=fault.cause, from_s=dead_s, to_s=to_s, worker=name))

    async def _when_it_listens(self, i: int) -> float:
        port = self._stage.engine_ports[i]
        await until(lambda: accepts(port), "an engine to listen again")
        return time.monotonic() - 0.05

    async def _stop(self, processes: Sequence[Child], fault: Fault) -> None:
        for one in processes:
            one.send(signal.SIGSTOP)
        await asyncio.sleep(fault.for_s)
        for one in processes:
            one.send(signal.SIGCONT)

    async def _fail(self, fault: Fault) -> None:
        engines = [self._stage.engines[i] for i in fault.workers]
        for engine in engines:
            await engine.ask(fail=_MODES[fault.cause])
        await asyncio.sleep(fault.for_s)
        for engine in engines:
            await engine.ask(fail="")

    async def _kill_relay(self, fault: Fault) -> None:
        (worker,) = fault.workers
        relay, from_s = self._stage.relay_of(worker), time.monotonic()
        if not relay.wanted:
            return  # another worker's, which is down already
        self.ended += [one for one in [relay.ended()] if one]
        await relay.kill()
        await asyncio.sleep(fault.for_s)
        await relay.start(answers=False)
        to_s = time.monotonic()
        for i, engine in enumerate(self._stage.engines):
            if i != worker and self._stage.relay_of(i) is relay:
                self._had(Trouble(cause=fault.cause, from_s=from_s, to_s=to_s, worker=engine.name))

    async def _break_wires(self, fault: Fault) -> None:
        """Altered events can't be told from true ones (their wire has no checksum): after such a
        fault the engine is started again, as an operator would."""
        (worker,) = fault.workers
        await self._break(self._stage.wires[worker], fault)
        if fault.cause is Cause.WIRE_CORRUPT:
            restart = Fault(fault.at_s, Cause.RESTART, 0.0, workers=fault.workers)
            await self._kill(worker, restart)

    async def _break(self, proxies: Sequence[Proxy], fault: Fault) -> None:
        for proxy in proxies:
            match fault.cause:
                case Cause.WIRE_CUT | Cause.LINE_CUT:
                    proxy.cut()
                case Cause.WIRE_SLOW | Cause.LINE_SLOW:
                    proxy.slow(SLOW_BYTES_PER_S)
                case _:
                    proxy.corrupt(CORRUPT_SHARE, self._rng)
        await asyncio.sleep(fault.for_s)
        for proxy in proxies:
            await proxy.heal()
            if fault.cause in {Cause.WIRE_CORRUPT, Cause.LINE_CORRUPT}:
                proxy.drop()  # what its streams believe by now is anybody's guess

    async def _kill_nats(self, fault: Fault) -> None:
        stage = self._stage
        await stage.nats.kill()
        await asyncio.sleep(fault.for_s)
        await stage.nats.start(answers=False)
        await until(lambda: accepts(stage.nats_port), "nats-server to listen")

    async def _fill_disk(self, fault: Fault) -> None:
        """No file of a router's or a relay's grows: what they write fails, as on a full disk."""
        stage = self._stage
        processes = [one for one in (*stage.routers, *stage.relays) if one.wanted]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for one in processes:
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (DISK_BYTES, before[1]))
        await asyncio.sleep(fault.for_s)
        for one in processes:
            if one.wanted and one.process is not None and one.process.returncode is None:
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, before)

    async def _take_descriptors(self, fault: Fault) -> None:
        """Routers open no further file or socket, for a while."""
        routers = [self._stage.routers[i] for i in fault.routers]
        before = [resource.prlimit(router.pid, resource.RLIMIT_NOFILE) for router in routers]
        for router, (_, hard) in zip(routers, before, strict=True):
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (STANDARD_FILES, hard))
        await asyncio.sleep(fault.for_s)
        for router, limits in zip(routers, before, strict=True):
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, limits)

    async def _drain(self, fault: Fault) -> None:
        """Drained through one router, taken back through another, whose clock is an hour off."""
        (worker,) = fault.workers
        routers = list(range(len(self._stage.routers)))
        self._rng.shuffle(routers)
        name = f"worker-{worker}"
        await self._tell_hostile(drain=name, router=routers[0], undrain=False)
        await asyncio.sleep(fault.for_s)
        for _ in range(_UNDRAINS_MAX):  # as an operator would, of a router that is busy
            if not await self._tell_hostile(drain=name, router=routers[-1], undrain=True):
                return
            await asyncio.sleep(1.0)

    async def _tell_hostile(self, **command: object) -> str:
        """Returns what went wrong; empty: nothing."""
        if self._stage.hostile is None:
            raise RuntimeError("this fault takes the hostile client")
        told = await self._stage.hostile.ask(**command)
        error: str = told.get("error", "")
        if error:
            self._note(f"        {command}: {error}")
        return error


def _notes(
    served: Sequence[Served], counted: dict[str, dict[str, float]], seconds: float
) -> dict[str, float]:
    total: Counter[str] = Counter()
    for name, counts in counted.items():
        if name != "hostile":
            total.update(counts)
    hostile = counted.get("hostile", {})
    ms = sorted(1e3 * (one.ended_s - one.began_s) for one in served if not one.failure)
    cached = {f"p{p}_ms": round(ms[len(ms) * p // 100], 1) for p in (50, 90, 99)} if ms else {}
    return {
        "requests": len(served),
        "requests_per_s": round(len(served) / seconds, 1),
        "failed": sum(bool(one.failure) for one in served),
        "attempts_more": sum(max(0, len(one.attempts) - 1) for one in served),
        "fallback_picks": sum(not at.replica for one in served for at in one.attempts),
        **cached,
        **dict(sorted(total.items())),
        **{f"hostile {name}": count for name, count in sorted(hostile.items())},
    }


def print_note(text: str) -> None:
    sys.stderr.write(text + "\n")
