"""Pickers in processes of their own, `kvroute picker`, before one router."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from router.gateway.picker.envoy_config import Address
from router.request.tokens import ModelPrompts, Source
from tests.envoy.stage import envoy_before
from tests.stage.served import Served, served
from tests.stage.waiting import free_port, until

STOP_S = 60.0
ENVOY = "KVROUTE_ENVOY"
"""The tests' own variable, which a kvroute would take for a key of its configuration."""


@dataclass
class Replica:
    """One picker's process, which may be started again on the same port."""

    target: str
    flags: dict[str, str]
    log: Path
    port: int
    process: asyncio.subprocess.Process | None = None

    @classmethod
    def before(cls, target: str, folder: Path, **flags: str) -> "Replica":
        port = free_port()
        return cls(target, flags, folder / f"picker-{port}.log", port)

    async def start(self) -> None:
        flags = [word for name, value in self.flags.items() for word in (f"--{name}", value)]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.app.main", "picker", "--router", self.target),
                *("--listen", f"127.0.0.1:{self.port}", "--metrics-listen", "127.0.0.1:0", *flags),
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name != ENVOY},
                start_new_session=True,
            )

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.ended()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """The exit code."""
        assert self.process is not None
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()

    @property
    def resident_kib(self) -> int:
        """Memory of the process."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        (line,) = (line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1])


@dataclass
class Fleet:
    """Envoy before pickers, a router and workers."""

    served: Served
    replicas: list[Replica]
    http: aiohttp.ClientSession
    base: str
    admin: str

    def post(self, body: dict[str, Any]) -> Any:
        return self.http.post(f"{self.base}/v1/chat/completions", json=body)

    async def idle(self) -> None:
        """Until nothing is reserved."""
        await until(lambda: not len(self.served.fleet.core.reservations), "nothing is reserved")

    async def healthy(self, replica: Replica, *, is_healthy: bool = True) -> None:
        """Until Envoy sees the picker so."""
        async with asyncio.timeout(60.0):
            while (await self._health(replica) == "healthy") is not is_healthy:  # noqa: ASYNC110  # Envoy sets no event
                await asyncio.sleep(0.05)

    async def requests(self, replica: Replica) -> int:
        """Streams of ext_proc that Envoy has open at a picker."""
        return int(await self._of(replica, "rq_active"))

    async def _health(self, replica: Replica) -> str:
        return await self._of(replica, "health_flags")

    async def _of(self, replica: Replica, name: str) -> str:
        async with self.http.get(f"{self.admin}/clusters") as answer:
            text = await answer.text()
        begin = f"kvroute::127.0.0.1:{replica.port}::{name}::"
        (line,) = (line for line in text.splitlines() if line.startswith(begin))
        return line.removeprefix(begin)


@asynccontextmanager
async def a_fleet(
    folder: Path, *workers: Any, replicas: int = 2, shows_answers: bool = True, **flags: str
) -> AsyncIterator[Fleet]:
    """flags: of each picker, without their dashes."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.run())
        without_tokens = {"m": ModelPrompts(source=Source.OFF)}
        router = await stack.enter_async_context(served(models_prompts=without_tokens))
        for number, worker in enumerate(workers):
            router.fleet.add(f"w{number}", address=worker.address, total_slots=1000)
        target = f"127.0.0.1:{router.server.port}"
        pickers = [Replica.before(target, folder, **flags) for _ in range(replicas)]
        for picker in pickers:
            stack.push_async_callback(picker.kill)
            await picker.start()
        addresses = [Address("127.0.0.1", picker.port) for picker in pickers]
        base, admin, _ = await stack.enter_async_context(
            envoy_before(folder, workers, addresses, shows_answers=shows_answers)
        )
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Fleet(router, pickers, http, base, admin)
