"""A real Chromium, its console's errors, and axe-core."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[2] / "build" / "console"
SHOTS = BUILD / "shots"
AXE = BUILD / "package" / "axe.min.js"
CHROMIUM = os.environ.get("KVROUTE_CHROMIUM") or shutil.which("chromium")
WAIT_MS = 60_000
SERIOUS = {"serious", "critical"}


@dataclass
class Tab:
    """A page that collects what its console says."""

    page: Any
    said: list[str] = field(default_factory=list)

    async def open(self, url: str) -> None:
        await self.page.goto(url)
        await self.drawn(1)

    async def drawn(self, times: int) -> None:
        """Waits until the page was drawn so often since it was opened."""
        await self.until(f"Number(document.body.dataset.drawn ?? 0) >= {times}")

    async def until(self, condition: str, value: object = None) -> None:
        """Waits until an expression, or a function of a value, is true. Playwright's own
        wait_for_function needs an eval in the page, which its policy forbids."""
        async with asyncio.timeout(WAIT_MS / 1000):
            while not await self.page.evaluate(condition, value):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def more(self, times: int = 2) -> None:
        """Waits until the page was drawn so often from now on."""
        now = await self.page.evaluate("Number(document.body.dataset.drawn ?? 0)")
        await self.drawn(now + times)

    async def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=str(SHOTS / f"{name}.png"))

    async def faults(self) -> list[str]:
        """Findings of axe-core that are serious, or worse."""
        await self.page.evaluate(AXE.read_text(encoding="utf-8"))
        result = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']} ({one['impact']}): {node['html'][:160]}"
            for one in result["violations"]
            if one["impact"] in SERIOUS
            for node in one["nodes"][:3]
        ]

    async def texts(self, selector: str) -> list[str]:
        found: list[str] = await self.page.locator(selector).all_inner_texts()
        return found


@dataclass
class Browser:
    """Chromium."""

    chromium: Any

    async def tab(self, width: int = 1400, height: int = 1000, **about: Any) -> Tab:
        context = await self.chromium.new_context(
            viewport={"width": width, "height": height}, **about
        )
        tab = Tab(await context.new_page())
        tab.page.set_default_timeout(WAIT_MS)
        tab.page.on("console", lambda one: tab.said.append(f"{one.type}: {one.text}"))
        tab.page.on("pageerror", lambda error: tab.said.append(f"error: {error}"))
        return tab


@asynccontextmanager
async def a_browser() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # Without a sandbox of its own: a container's root has none, and pages are ours.
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT_MS
        )
        try:
            yield Browser(chromium)
        finally:
            await chromium.close()
