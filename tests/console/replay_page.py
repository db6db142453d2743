"""The page of `kvroute replay --html`, and its picture: python -m tests.console.replay_page"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.console.browser import a_browser
from tests.console.pictures import PICTURES

CLIP = {"x": 0, "y": 0, "width": 1040, "height": 1620}
"""Of the page: its pictures, without the tables below them."""


async def replayed(file: Path) -> None:
    """Three policies on the included conversations, written to a file."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.app.main", "replay", "conversation", "--workers", "8"),
        *("--rate", "6", "--policy", "dynamo-adaptive", "--compare", "round-robin,ttft"),
        *("--tenants", "4", "--until", "600", "--html", str(file), "--quiet"),
    )
    if await process.wait():
        raise RuntimeError("kvroute replay failed")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        await replayed(file)
        async with a_browser() as browser:
            tab = await browser.tab(CLIP["width"], 1000, color_scheme="light")
            await tab.page.goto(file.as_uri())
            to = str(PICTURES / "replay-page.png")
            await tab.page.screenshot(path=to, full_page=True, clip=CLIP)


if __name__ == "__main__":
    asyncio.run(main())
