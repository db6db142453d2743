"""The processes of a run: a server, one attack at a time, and the good client in this process."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tests.hostile.good import HOSTILE, Calls, GoodClient, a_good_client
from tests.hostile.locked_attacks import LOCKED
from tests.hostile.target import Target

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
END_S = 60.0
NICE = "10"
"""Of attacks, which would have another host."""
MEMORY_SHARE = 1.1
"""Of its memory before an attack that a server has RECOVERY_S after it, at most."""
RECOVERY_S = 60.0


class Look(msgspec.Struct):
    """A server at some time."""

    resident_mib: float
    turn_ms: float
    """CPU time of the loop's longest turn since the last look."""


class Process:
    """A Python module in a process of its own, which ends with its input."""

    def __init__(self, started: asyncio.subprocess.Process) -> None:
        if started.stdin is None or started.stdout is None:
            raise AssertionError("both are pipes")
        self._in, self._out = started.stdin, started.stdout
        self._started = started

    async def line(self) -> bytes:
        """The next line of its output."""
        async with asyncio.timeout(START_S):
            return await self._out.readline()

    async def look(self) -> Look:
        """What a server says of itself."""
        self._in.write(b"{}\n")
        return msgspec.json.decode(await self.line(), type=Look)

    async def end(self) -> list[bytes]:
        """Its last lines; raises RuntimeError if it failed."""
        self._in.close()
        async with asyncio.timeout(END_S):
            rest = (await self._out.read()).splitlines()
            code = await self._started.wait()
        if code:
            raise RuntimeError(f"the process ended with {code}")
        return rest


@asynccontextmanager
async def process(*words: str, nice: str = "0") -> AsyncIterator[Process]:
    """Starts one, and kills it if it has not ended by itself."""
    started = await asyncio.create_subprocess_exec(
        *("nice", "-n", nice, sys.executable, "-m", *words),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(started)
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


class Stage:
    """A server under attack, and a good client of it."""

    def __init__(self, server: Process, target: Target, good: GoodClient) -> None:
        self.server = server
        self._target = target
        self._good = good

    async def calls(self, seconds: float) -> Calls:
        """The good client's calls without an attack."""
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, stop.set)
        return await self._good.calls(stop)

    async def calls_under(
        self, name: str, seed: int, seconds: float
    ) -> tuple[Calls, dict[str, int]]:
        """Those while an attack goes on; how many connections the attack opened, by port."""
        words = (name, str(seed), msgspec.json.encode(self._target).decode())
        async with process("tests.hostile.attacks", *words, nice=NICE) as attack:
            await attack.line()
            calls = await self.calls(seconds)
            said = await attack.end()
        opened: dict[str, int] = msgspec.json.decode(said[-1])["opened"]
        return calls, opened

    async def memory_after(self, before_mib: float) -> float:
        """The server's memory in MiB once it is within MEMORY_SHARE of what it was, or RECOVERY_S
        later."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + RECOVERY_S
        while True:
            now_mib = (await self.server.look()).resident_mib
            if now_mib <= MEMORY_SHARE * before_mib or loop.time() >= until_s:
                return now_mib
            await self.calls(1.0)


@asynccontextmanager
async def staged(name: str) -> AsyncIterator[Stage]:
    """A server for an attack: with TLS and keys if the attack is about them."""
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder) if name in LOCKED else None
        words = () if locked is None else (folder,)
        async with (
            process("tests.hostile.engines") as engines,
            process("tests.hostile.server", (await engines.line()).decode(), *words) as server,
        ):
            ports: dict[str, int] = msgspec.json.decode(await server.line())
            async with a_good_client(ports, locked) as good:
                target = Target(ports)
                if locked is not None:
                    target = Target(ports, str(locked / "authority.pem"), f"{HOSTILE}-token")
                yield Stage(server, target, good)
            await server.end()
