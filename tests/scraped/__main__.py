"""A real Prometheus scrapes real processes: python -m tests.scraped [--healthy] [--only WORDS]

First a fleet that has everything, with TLS on the metrics and without; then each story's alerts;
then each query of the dashboard over the whole run. --healthy: load without a fault, and no alert.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tests.scraped.dashboard import METRICS, empty_queries, missing_metrics, present_metrics
from tests.scraped.everything import everything, use_everything
from tests.scraped.prometheus import Prometheus, a_prometheus
from tests.scraped.stage import BUSY, LIMIT_S, UNSCRAPED, Fleet, a_fleet, until
from tests.scraped.stories import STORIES, Story

FACTOR = 20.0
AT_ONCE = 4
RATES_S = 15.0
"""How long the last metric stays: of a counter that is scraped once the dashboard has no rate."""


class Run:
    """What was seen so far."""

    def __init__(self, folder: Path, prometheus: Prometheus, at_once: int) -> None:
        self.folder, self.prometheus = folder, prometheus
        self.troubles: list[str] = []
        self.fired: set[str] = set()
        self.rules: set[str] = set()
        self._places = asyncio.Semaphore(at_once)
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:5.0f} s  {text}", flush=True)  # noqa: T201

    def trouble(self, text: str) -> None:
        self.troubles.append(text)
        self.say(f"WRONG: {text}")

    async def story(self, number: int, story: Story) -> None:
        """Plays one until its alerts have fired."""
        async with self._places:
            try:
                name = f"story-{number}"
                async with a_fleet(name, story.setup, self.folder, self.prometheus) as fleet:
                    self.rules |= fleet.alerts
                    began_s = time.monotonic()
                    seen = await _played(fleet, story)
                    self.fired |= seen
                    odd = seen - story.fires - story.may - BUSY
                    if await fleet.count("count(avg_over_time(up{FLEET}[10m]) < 1)"):
                        odd -= UNSCRAPED
                    if odd:
                        self.trouble(f"{story.told}: {', '.join(sorted(odd))} fired, too")
                    took_s = time.monotonic() - began_s
                    self.say(f"{story.told}: {', '.join(sorted(seen))} after {took_s:.0f} s")
            except Exception as error:  # the others go on
                self.trouble(f"{story.told}: {error!r}")

    async def all_metrics(self, name: str, tls: str) -> None:
        """A fleet with everything has every metric but those that need an error."""
        names: set[str] = set()
        async with self._places:
            try:
                async with everything(name, tls, self.folder, self.prometheus) as fleet:
                    there_s: list[float] = []

                    async def all_there() -> bool:
                        names.update(await self.prometheus.names(name))
                        if missing_metrics(names):
                            return False
                        there_s.append(time.monotonic())
                        return there_s[-1] - there_s[0] > RATES_S

                    try:
                        await _while(use_everything(fleet), all_there, "all metrics")
                    finally:
                        count = len(present_metrics(names))
                        self.say(f"metrics.tls {tls}: {count} of {len(METRICS)} metrics")
            except Exception as error:  # the others go on
                self.trouble(f"metrics.tls {tls}: {error!r}; missing: {missing_metrics(names)}")


async def _played(fleet: Fleet, story: Story) -> set[str]:
    """All alerts that fired up to the moment when the story's had."""
    seen: set[str] = set()

    async def fires() -> bool:
        alerts = await fleet.prometheus.alerts(fleet.name)
        seen.update(name for name, states in alerts.items() if "firing" in states)
        return story.fires <= seen

    try:
        await _while(story.play(fleet), fires, ", ".join(sorted(story.fires)))
    except AssertionError as error:
        alerts = await fleet.prometheus.alerts(fleet.name)
        raise AssertionError(f"{error}; fired: {sorted(seen)}, now: {alerts}") from None
    return seen


async def _while(
    work: Awaitable[object],
    condition: Callable[[], Awaitable[bool]],
    told: str,
    seconds: float = LIMIT_S,
) -> None:
    """Waits until a condition holds, and meanwhile works; raises what the work raises."""
    working = asyncio.ensure_future(work)

    async def holds() -> bool:
        if working.done():
            working.result()
        return await condition()

    try:
        await until(holds, told, seconds)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def play(asked: argparse.Namespace, folder: Path) -> list[str]:
    """All of it; what was wrong."""
    async with a_prometheus(folder, asked.factor) as prometheus:
        run = Run(folder, prometheus, asked.at_once)
        begin_s = time.time()
        chosen = [
            one for one in STORIES if not asked.only or any(w in one.told for w in asked.only)
        ]
        work = [run.story(STORIES.index(one), one) for one in chosen]
        if not asked.only or "everything" in asked.only:
            work[:0] = [run.all_metrics("with-tls", "server"), run.all_metrics("plain", "off")]
        await asyncio.gather(*work)
        if not asked.only:
            for alert in sorted(run.rules - run.fired):
                run.trouble(f"{alert} fired in no story")
            for one in missing_metrics(await prometheus.names(), after_errors=True):
                run.trouble(f"{one} was never scraped")
            for one in await empty_queries(prometheus, begin_s, time.time()):
                run.trouble(f"no series: {one}")
        run.say(f"{len(run.fired)} of {len(run.rules)} alerts fired")
        return run.troubles


async def healthy(asked: argparse.Namespace, folder: Path) -> list[str]:
    """Load without a fault; alerts that fired."""
    async with a_prometheus(folder, asked.factor) as prometheus, AsyncExitStack() as stack:
        run = Run(folder, prometheus, 2)
        fleet = await stack.enter_async_context(everything("healthy", "server", folder, prometheus))
        pending: dict[str, int] = {}
        end_s = time.monotonic() + asked.seconds

        async def is_over() -> bool:
            for name, states in (await prometheus.alerts(fleet.name)).items():
                if "firing" in states and name not in run.fired:
                    run.fired.add(name)
                    run.trouble(f"{name} fired")
                if "pending" in states:
                    pending[name] = pending.get(name, 0) + 1
            return time.monotonic() > end_s

        await _while(use_everything(fleet), is_over, "the end", asked.seconds + LIMIT_S)
        served = await fleet.count("sum(kvroute_requests_total{FLEET, outcome='picked'})")
        run.say(f"{served:.0f} picks in {asked.seconds:.0f} s; pending for a while: {pending}")
        return run.troubles


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scraped", description=__doc__)
    parser.add_argument("--only", nargs="*", help="stories whose names have these words")
    parser.add_argument("--healthy", action="store_true", help="load without a fault")
    parser.add_argument("--seconds", type=float, default=900.0, help="of --healthy")
    parser.add_argument("--factor", type=float, default=FACTOR, help="durations are divided by it")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="fleets that run")
    parser.add_argument("--folder", type=Path, help="an empty one, for logs; a temporary one")
    asked = parser.parse_args(words)
    if shutil.which("prometheus") is None:
        print("scraped: 0 played; no prometheus: .ci/prometheus.sh says why")  # noqa: T201
        return 0
    with tempfile.TemporaryDirectory(prefix="kvroute-scraped-") as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        troubles = asyncio.run((healthy if asked.healthy else play)(asked, folder))
    for one in troubles:
        print(f"WRONG: {one}")  # noqa: T201
    return bool(troubles)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
