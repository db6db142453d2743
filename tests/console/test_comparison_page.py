"""The page of `kvroute replay --html` in a real Chromium: drawn, legible, and without a request."""

from pathlib import Path

import pytest

from tests.console.browser import AXE, CHROMIUM, SHOTS, a_browser
from tests.console.replay_page import replayed

pytest.importorskip("playwright", reason="make console installs it")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(not AXE.exists(), reason="no axe-core: make console fetches it"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of the browser's pipes, at its end
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1200])
async def test_the_page_is_drawn_and_calls_nothing(tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "page.html"
    await replayed(file)
    async with a_browser() as browser:
        tab = await browser.tab(width=width, color_scheme=scheme)
        called: list[str] = []
        tab.page.on("request", lambda request: called.append(request.url))
        await tab.page.goto(file.as_uri())
        assert await tab.page.locator("svg[role=img]").count() == 5
        assert await tab.page.locator("svg path.line.s2").count() == 4
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await tab.page.evaluate(overflow) <= 0
        assert await tab.faults() == []
        SHOTS.mkdir(parents=True, exist_ok=True)
        shot = str(SHOTS / f"replay-{scheme}-{width}.png")
        await tab.page.screenshot(path=shot, full_page=True)
        assert [url for url in called if not url.startswith(("file:", "data:"))] == []
        assert tab.said == []
