"""Scrapes of a registry, and of others beside it: their values as text, on request.

Law: a family of several collectors or registries is written once, and so is each of its series: of
equal series, the first one's value is written.
"""

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from router.observe.metrics.families import Read

OPENMETRICS = "application/openmetrics-text"
PAUSES = 1.0
PAUSE_MAX_S = 1.0
"""A scrape that took t seconds is followed by a pause of PAUSES x t, at most PAUSE_MAX_S: scrapes
of up to a second take at most half of the time, however many come."""
TURN_ROWS = 1000
"""Rows of a scrape that are read before other work has its turn on the event loop. Turns are given
between families; what a collector reads in one go, for each worker, takes up to 6 ms with 1,000."""


class Scrapes:
    """Scrapes of registries, one at a time; those that come meanwhile share the next one.

    An answer's values are never older than its request, and a thousand scrapes of one format that
    come at once cost as much as two.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registries = [registry]
        self._turn = asyncio.Lock()
        self._next: dict[str, asyncio.Task[tuple[bytes, str]]] = {}
        """The scrape of each format that has not read its values yet."""
        self._not_before_s = 0.0
        """Loop time at which the pause after the last scrape ends."""

    def add(self, registry: CollectorRegistry) -> None:
        """Adds a registry, which is written from the next scrape on."""
        self._registries.append(registry)

    async def text(self, accept: str = "") -> tuple[bytes, str]:
        """The content and its type. accept: the header of the scrape; OpenMetrics 1.0.0, the format
        with exemplars, where the header wants it in any version from 1.0.0 on, else Prometheus'
        text 0.0.4."""
        wanted = _OPENMETRICS_1 if _is_openmetrics(accept) else ""
        scrape = self._next.get(wanted)
        if scrape is None:
            scrape = self._next[wanted] = asyncio.create_task(self._scrape(wanted))
        return await asyncio.shield(scrape)  # a client that leaves takes nothing from the others

    async def _scrape(self, wanted: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(wanted)
        async with self._turn:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(self._not_before_s - loop.time())
            del self._next[wanted]
            began_s = loop.time()
            try:
                families = await self._read()
                return await asyncio.to_thread(encode, Read(lambda: families)), content_type
            finally:
                took_s = loop.time() - began_s
                self._not_before_s = loop.time() + min(PAUSES * took_s, PAUSE_MAX_S)

    async def _read(self) -> list[Metric]:
        """Reads the registries on the event loop, since collectors read the core there, in turns:
        families are not of the same moment."""
        families, rows = dict[str, Metric](), 0
        for registry in self._registries:
            for family in registry.collect():
                join(families, family)
                rows += len(family.samples)
                if rows >= TURN_ROWS:
                    rows = 0
                    await asyncio.sleep(0)
        return list(families.values())


def join(families: dict[str, Metric], family: Metric) -> None:
    """Adds a family by its name, or its series that the family of that name does not have."""
    first = families.setdefault(family.name, family)
    if first is family:
        return
    known = {(sample.name, *sorted(sample.labels.items())) for sample in first.samples}
    first.samples += [
        sample
        for sample in family.samples
        if (sample.name, *sorted(sample.labels.items())) not in known
    ]


_OPENMETRICS_1 = f"{OPENMETRICS}; version=1.0.0"


def _is_openmetrics(accept: str) -> bool:
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # an invalid version
        return False
    return content_type.startswith(OPENMETRICS)
