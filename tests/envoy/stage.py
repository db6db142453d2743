"""A real Envoy before a picker, a router and workers, all on loopback."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from router.gateway.picker.counters import OUTCOMES
from router.gateway.picker.envoy_config import Address, envoy_config
from tests.stage.gateway import Worker
from tests.stage.picker import Stage, a_picker
from tests.stage.waiting import free_port, until

START_S = 60.0
_REQUESTS = "kvroute_picker_requests_total"


@dataclass
class Envoy:
    """Envoy, its picker and a client."""

    stage: Stage
    http: aiohttp.ClientSession
    base: str
    admin: str
    process: asyncio.subprocess.Process

    @property
    def open(self) -> float:
        """Open requests of the picker."""
        return self.stage.sample("kvroute_open_requests", program="picker")

    def outcomes(self) -> dict[str, float]:
        """Requests of the picker by outcome, those that there were."""
        counted = {name: self.stage.sample(_REQUESTS, outcome=name) for name in OUTCOMES}
        return {name: count for name, count in counted.items() if count}

    def post(
        self,
        body: bytes | io.BytesIO | dict[str, Any],
        path: str = "/v1/chat/completions",
        **about: Any,
    ) -> Any:
        content = {"json": body} if isinstance(body, dict) else {"data": body}
        return self.http.post(f"{self.base}{path}", **content, **about)

    async def idle(self) -> None:
        """Until nothing is reserved and each stream is over, which may be a little later."""
        await self.stage.idle()
        await until(lambda: self.open == 0, "no request is open in the picker")


def address(base: str) -> Address:
    host, _, port = base.removeprefix("http://").rpartition(":")
    return Address(host, int(port))


@asynccontextmanager
async def an_envoy(
    folder: Path,
    *workers: Worker,
    known: int | None = None,
    shows_answers: bool = True,
    changes: Any = lambda config: None,
    **settings: Any,
) -> AsyncIterator[Envoy]:
    """known: workers that Envoy knows, of those that the router knows; None: all. changes: of the
    configuration that `kvroute envoy-config` prints. settings: of the picker.

    Its checks of health wait for 30 s, not 1: client, workers, router and picker share a process,
    and Envoy would go around a picker that is only slow.
    """

    def patient(config: dict[str, Any]) -> None:
        for cluster in config["static_resources"]["clusters"]:
            for check in cluster.get("health_checks", ()):
                check["timeout"] = "30s"
        changes(config)

    async with a_picker(*workers, **settings) as stage:
        picker = Address("127.0.0.1", stage.picker.port)
        async with envoy_before(
            folder, workers[:known], [picker], shows_answers=shows_answers, changes=patient
        ) as (base, admin, process):
            # Connections are not kept: one that Envoy closes meanwhile is no finding here.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                yield Envoy(stage, http, base, admin, process)


@asynccontextmanager
async def envoy_before(
    folder: Path,
    workers: Any,
    pickers: list[Address],
    *,
    shows_answers: bool = True,
    changes: Any = lambda config: None,
) -> AsyncIterator[tuple[str, str, asyncio.subprocess.Process]]:
    """Envoy's base, its admin base and its process."""
    port, admin = free_port(), free_port()
    config = envoy_config(
        listen=Address("127.0.0.1", port),
        admin=Address("127.0.0.1", admin),
        pickers=pickers,
        workers=[address(worker.address) for worker in workers],
        shows_answers=shows_answers,
    )
    changes(config)
    path = folder / f"envoy-{port}.yaml"
    path.write_text(yaml.safe_dump(config))
    log = (folder / f"envoy-{port}.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        os.environ["KVROUTE_ENVOY"],
        *("-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"),
        *("--disable-hot-restart", "-l", "warning"),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        base, about = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
        await _ready(about, process)
        yield base, about, process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        log.close()


async def _ready(admin: str, process: asyncio.subprocess.Process) -> None:
    """Until Envoy's pickers are healthy."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
        while True:
            assert process.returncode is None, "Envoy ended"
            try:
                async with http.get(f"{admin}/clusters") as answer:
                    text = await answer.text()
            except aiohttp.ClientError:
                text = ""
            lines = [line for line in text.splitlines() if line.startswith("kvroute::")]
            flags = [line for line in lines if "::health_flags::" in line]
            if flags and all(line.endswith("healthy") for line in flags):
                return
            await asyncio.sleep(0.05)


async def counters(envoy: Envoy, prefix: str) -> Mapping[str, int]:
    """Envoy's own counters by name."""
    async with envoy.http.get(f"{envoy.admin}/stats", params={"filter": prefix}) as answer:
        text = await answer.text()
    rows = (line.split(": ") for line in text.splitlines() if ": " in line)
    return {name: int(value) for name, value in rows if value.isdigit()}
