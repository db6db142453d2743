"""Pictures of the console for the documentation: python -m tests.console.pictures [MINUTES]

A real router, 40 played workers and requests to them; after so many minutes (10) docs/pictures has
the page in light and dark. It needs what `make console` installs.
"""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from tests.console.browser import a_browser
from tests.console.crowd import a_crowd

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
RATE = 16.0
OUTPUT_S = 6.0
WIDTH, HEIGHT = 1280, 1250


def workers() -> list[tuple[str, dict[str, Any]]]:
    big: dict[str, Any] = {"model": "llama-3.3-70b", "total_slots": 6, "total_blocks": 3000}
    small: dict[str, Any] = {"model": "qwen3-8b", "total_slots": 6, "total_blocks": 3000}
    about = {"engine_version": "0.20.1"}
    return [(f"llama-{i:02}", big | about) for i in range(28)] + [
        (f"qwen-{i:02}", small | about) for i in range(12)
    ]


async def main(minutes: float) -> None:
    PICTURES.mkdir(exist_ok=True)
    async with a_crowd(workers(), rate=RATE, output_s=OUTPUT_S) as crowd, a_browser() as browser:
        keys = {key.worker_id: key for key in crowd.fleet.relays}
        await asyncio.sleep(60 * minutes)
        crowd.app.core.drain("llama-17")
        crowd.fleet.say(
            keys["qwen-04"],
            warnings=("its engine has 4 data-parallel ranks, but its relay reads 2",),
            warning_codes=("ranks",),
        )
        crowd.silent.add(keys["llama-09"])
        tabs = [
            (scheme, await browser.tab(WIDTH, HEIGHT, color_scheme=scheme))
            for scheme in ("light", "dark")
        ]
        for _, tab in tabs:
            await tab.open(crowd.url)
        await asyncio.sleep(12)
        for scheme, tab in tabs:
            await tab.page.screenshot(path=str(PICTURES / f"console-{scheme}.png"))
        _, tab = tabs[0]
        await tab.page.locator("#hold").click()
        moved = tab.page.locator("#decisions li", has_text="guard moved it")
        some = moved if await moved.count() else tab.page.locator("#decisions li")
        await some.first.locator("summary").click()
        await some.first.evaluate(
            "(one) => { one.parentElement.scrollTop += one.getBoundingClientRect().top"
            " - one.parentElement.getBoundingClientRect().top; }"
        )
        await tab.page.locator("#sampled").screenshot(path=str(PICTURES / "console-receipt.png"))


if __name__ == "__main__":
    socket.gethostname = lambda: "kvroute-0"  # the replica's name is in the picture
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0))
