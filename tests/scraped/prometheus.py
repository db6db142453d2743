"""A real Prometheus on loopback; its targets and rules come and go with the fleets."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from router.cluster.children.process import end, spawn
from tests.scraped.divided import divided
from tests.stage.waiting import free_port

START_S = 120.0
EVALUATION = "15s"
"""Divided, as all durations are."""

Labels = dict[str, str]


class Prometheus:
    """Its HTTP API, and the configuration that it runs with."""

    def __init__(self, folder: Path, factor: float) -> None:
        self.factor = factor
        self.port = free_port()
        self.config = folder / "prometheus.yaml"
        self._folder = folder
        self._jobs: dict[str, list[dict[str, Any]]] = {}
        self._changing = asyncio.Lock()
        self._http: aiohttp.ClientSession
        self.write()

    def write(self) -> None:
        evaluated = divided(EVALUATION, self.factor)
        config = {
            "global": {"scrape_interval": evaluated, "scrape_timeout": evaluated}
            | {"evaluation_interval": evaluated},
            "rule_files": [str(self._folder / f"{fleet}.rules.yaml") for fleet in self._jobs],
            "scrape_configs": [job for jobs in self._jobs.values() for job in jobs],
        }
        self.config.write_text(yaml.safe_dump(config), encoding="utf-8")

    async def watch(
        self, fleet: str, jobs: list[dict[str, Any]], rules: dict[str, Any] | None = None
    ) -> None:
        """Scrapes these jobs from now on, and evaluates these rules; no rules: the fleet's own."""
        async with self._changing:
            self._jobs[fleet] = jobs
            if rules is not None:
                # Groups of all fleets have the same names, each in a file of its own.
                file = self._folder / f"{fleet}.rules.yaml"
                file.write_text(yaml.safe_dump(rules), encoding="utf-8")
            await self._reload()

    async def forget(self, fleet: str) -> None:
        async with self._changing:
            del self._jobs[fleet]
            await self._reload()

    async def names(self, fleet: str = ".+") -> set[str]:
        """Of all metrics that were scraped, of one fleet or all."""
        match = {"match[]": f'{{fleet=~"{fleet}"}}'}
        return set(await self._get("label/__name__/values", **match))

    async def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Series with their values of now."""
        found = await self._get("query", query=expression)
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    async def query_range(
        self, expression: str, begin_s: float, end_s: float, step_s: float
    ) -> int:
        """Series that an expression has at any of these times."""
        times = {"start": f"{begin_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:.3f}"}
        return len((await self._get("query_range", query=expression, **times))["result"])

    async def alerts(self, fleet: str) -> dict[str, set[str]]:
        """Alert -> states of now: pending, firing."""
        found: dict[str, set[str]] = {}
        for one in (await self._get("alerts"))["alerts"]:
            if one["labels"]["fleet"] == fleet:
                found.setdefault(one["labels"]["alertname"], set()).add(one["state"])
        return found

    async def _reload(self) -> None:
        self.write()
        async with self._http.post("/-/reload") as answer:
            if answer.status != 200:
                raise AssertionError(f"Prometheus refuses {self.config}: {await answer.text()}")

    async def _get(self, path: str, **query: str) -> Any:
        async with self._http.get(f"/api/v1/{path}", params=query) as answer:
            told = await answer.json()
        if told["status"] != "success":
            raise AssertionError(f"{path} {query}: {told}")
        return told["data"]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        base = f"http://127.0.0.1:{self.port}"
        async with aiohttp.ClientSession(base) as self._http, asyncio.timeout(None) as limit:
            limit.reschedule(asyncio.get_running_loop().time() + START_S)
            while True:
                try:
                    async with self._http.get("/-/ready") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    pass  # it starts
                await asyncio.sleep(0.1)
            limit.reschedule(None)
            yield


@asynccontextmanager
async def a_prometheus(folder: Path, factor: float) -> AsyncIterator[Prometheus]:
    """Runs the one on PATH. Raises FileNotFoundError where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("no prometheus: .ci/prometheus.sh says where it can be had")
    one = Prometheus(folder, factor)
    command = [
        *(program, f"--config.file={one.config}", f"--storage.tsdb.path={folder / 'series'}"),
        *(f"--web.listen-address=127.0.0.1:{one.port}", "--web.enable-lifecycle"),
        *("--log.level=warn",),
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = spawn(command, log)
    try:
        async with one.session():
            yield one
    finally:
        await end(process)
