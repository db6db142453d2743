"""The console in Chromium: it shows what gRPC says, lives, and takes no name for markup."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvroute.v1 import fleet_pb2
from router.app.processes.router_process import RouterApp
from router.config.settings.keys_settings import KeysSettings
from router.config.settings.queue_settings import QueueSettings
from router.observe.console.console import Console
from tests.console.browser import AXE, CHROMIUM, a_browser
from tests.console.crowd import Crowd, a_crowd, many
from tests.stage.keys import identity, write_keys
from tests.stage.waiting import until

pytest.importorskip("playwright", reason="make console installs it")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(not AXE.exists(), reason="no axe-core: make console fetches it"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of the browser's pipes, at its end
]
ATTACKS = (
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "javascript:window.hacked=1",
    "\u202egnp.tnegni",
    "a" * 200,
)


def console_of(crowd: Crowd) -> Console:
    pages = crowd.app.listeners.pages
    assert pages is not None
    return pages.console


async def statuses(crowd: Crowd) -> dict[str, fleet_pb2.WorkerStatus]:
    """ListWorkers over gRPC."""
    return {one.worker_id: one for one in await crowd.client.list_workers()}


async def labels(tab: Any) -> dict[str, str]:
    """Name -> what a screen reader says of each tile."""
    made: list[str] = await tab.page.evaluate(
        "[...document.querySelectorAll('.group:not(.attention) .tile')]"
        ".map((one) => one.getAttribute('aria-label'))"
    )
    return {one.split(" ")[0]: one for one in made}


async def test_each_view_shows_what_the_router_says() -> None:
    workers = [*many(12), ("prefill-0", {"role": "prefill"}), ("decode-0", {"role": "decode"})]
    async with a_crowd(workers, rate=15.0) as crowd, a_browser() as browser:
        tab = await browser.tab(height=3000)
        await tab.open(crowd.url)
        keys = {key.worker_id: key for key in crowd.fleet.relays}
        crowd.fleet.say(
            keys["gpu-0007"], warnings=("4 ranks, but 2 are configured",), warning_codes=("ranks",)
        )
        crowd.app.core.drain("gpu-0005")
        console = console_of(crowd)
        await until(lambda: len(console.history.points) >= 2, "two points of the history")
        await until(lambda: len(console.decisions.kept) >= 10, "sampled decisions")
        await tab.more(6)
        served = await statuses(crowd)
        shown = await labels(tab)
        assert set(shown) == set(served)
        for worker_id, status in served.items():
            assert f"of {status.total_slots} requests" in shown[worker_id]
        assert "drained" in shown["gpu-0005"]
        assert "warnings" in shown["gpu-0007"]
        heads = await tab.texts(".group h3")
        assert {"llama-3.3-70b", "qwen3-8b", "m"} <= set(heads)
        assert "workers\n\n13 of 14" in "\n".join(await tab.texts("#numbers"))
        (reachable,) = await tab.texts("#numbers .number:nth-child(2) .small")
        assert re.fullmatch(r"\d+(\.\d)? % reachable", reachable)
        assert "look at" in (await tab.texts("#warnings"))[0].lower()
        assert (
            "ranks, first_rank and the endpoints of the relay" in (await tab.texts("#warnings"))[0]
        )
        assert "gpu-0005" in (await tab.texts("#news"))[0]
        assert "drained" in (await tab.texts("#news"))[0]
        assert await tab.page.locator("#charts svg path.line").count() >= 3
        assert await tab.page.locator("#prefixes .node").count() >= 2
        assert "512 tokens" in (await tab.texts("#prefixes"))[0]
        await a_receipt_opens(tab, crowd)
        await a_decision_is_found(tab, crowd)
        await the_keyboard_opens_a_worker(tab)
        assert await tab.faults() == []
        await tab.shot("fleet-light")
        assert tab.said == []
        dark = await browser.tab(height=2400, color_scheme="dark")
        await dark.open(crowd.url)
        await dark.more(6)
        assert await dark.faults() == []
        await dark.shot("fleet-dark")
        phone = await browser.tab(390, 844, device_scale_factor=2, is_mobile=True, has_touch=True)
        await phone.open(crowd.url)
        await phone.more(3)
        assert await phone.page.evaluate("document.documentElement.scrollWidth") == 390
        assert await phone.faults() == []
        await phone.shot("fleet-phone")
        assert dark.said == phone.said == []


async def a_receipt_opens(tab: Any, crowd: Crowd) -> None:
    """A decision's rows are those that the router sampled."""
    await tab.page.locator("#hold").click()
    first = tab.page.locator("#decisions details").first
    await first.locator("summary").click()
    cells = first.locator("tbody tr")
    await cells.first.wait_for()
    ids = await first.locator(".ids").inner_text()
    console = console_of(crowd)
    (decision,) = [one for one in console.decisions.kept if one.request_id in ids]
    assert await cells.count() == len(decision.rows)
    names = await first.locator("tbody th").all_inner_texts()
    for name, row in zip(names, decision.rows, strict=True):
        assert row.worker_id in name
    heads = await first.locator("thead th").all_inner_texts()
    varied = [
        term for term in decision.rows[0].terms if any(row.terms[term] for row in decision.rows)
    ]
    assert heads[2 : 2 + len(varied)] == [term.replace("_", " ") for term in varied]
    assert "ttft would have" in await first.locator(".story").inner_text()
    await tab.shot("receipt")


async def a_decision_is_found(tab: Any, crowd: Crowd) -> None:
    """By the id of its reservation; another id says that nothing is known of it."""
    console = console_of(crowd)
    decision = console.decisions.kept[-1]
    await tab.page.fill("#find-id", decision.reservation_id)
    await tab.page.keyboard.press("Enter")
    shown = tab.page.locator("#past .ids")
    await shown.wait_for()
    assert decision.request_id in await shown.inner_text()
    await tab.shot("past")
    await tab.page.fill("#find-id", "unknown")
    await tab.page.keyboard.press("Enter")
    await tab.page.locator("#past-about", has_text="no pick of this id").wait_for()
    assert await shown.count() == 0


async def the_keyboard_opens_a_worker(tab: Any) -> None:
    tile = tab.page.locator(".tile", has_text="gpu-0007").first
    await tile.focus()
    await tab.page.keyboard.press("Enter")
    dialog = tab.page.locator("dialog[open]")
    await dialog.wait_for()
    text = await dialog.inner_text()
    assert "gpu-0007" in text
    assert "4 ranks, but 2 are configured" in text
    assert "http://gpu-0007:8000" in text
    assert await tab.faults() == []
    await tab.shot("worker")
    await tab.page.keyboard.press("Escape")
    await dialog.wait_for(state="hidden")
    assert await tile.evaluate("(one) => one === document.activeElement")


async def test_a_worker_that_dies_turns_within_two_seconds() -> None:
    """Of the router's own knowledge, which comes BEAT_TIMEOUT_S after the last beat. The best
    of three deaths counts: a machine may be busy."""
    async with a_crowd(many(12), rate=5.0) as crowd, a_browser() as browser:
        tab = await browser.tab()
        await tab.open(crowd.url)
        took = []
        for place in (1, 2, 3):
            key = list(crowd.fleet.relays)[place]
            source = crowd.app.view.sources[key]
            crowd.silent.add(key)
            await until(lambda source=source: source.stream.state == "silent", "its silence")
            began = time.perf_counter()
            name = key.worker_id
            await tab.until(
                "(name) => [...document.querySelectorAll('.tile.bad .name')]"
                ".some((one) => one.textContent === name)",
                name,
            )
            took.append(time.perf_counter() - began)
            assert name in (await tab.texts("#verdict"))[0]
        assert min(took) < 2.0, took
        assert tab.said == []


async def test_a_thousand_workers_stay_legible() -> None:
    async with a_crowd(many(1000), rate=10.0) as crowd, a_browser() as browser:
        keys = list(crowd.fleet.relays)
        tab = await browser.tab(height=1500)
        await tab.open(crowd.url)
        assert await tab.page.locator(".tile").count() == 1000
        crowd.silent.update(keys[100:106])
        await tab.until("document.querySelectorAll('.group.attention .tile').length === 6")
        await tab.more()
        assert "994 of 1000 workers serve" in (await tab.texts("#fleet-sum"))[0]
        assert "6 workers are silent" in (await tab.texts("#verdict"))[0]
        sizes = await tab.page.evaluate(
            "[...document.querySelectorAll('.group:not(.attention) .tile')].map((one) =>"
            " one.getBoundingClientRect()).map(({width, height}) => Math.min(width, height))"
        )
        assert min(sizes) >= 20
        await tab.page.fill("#filter", "gpu-0042")
        await tab.until("document.querySelectorAll('.tile').length === 1")
        await tab.page.fill("#filter", "")
        await tab.until("document.querySelectorAll('.tile').length > 1000")
        assert await tab.faults() == []
        await tab.shot("thousand-light")
        await tab.page.emulate_media(color_scheme="dark")
        await tab.shot("thousand-dark")
        assert tab.said == []


async def test_hostile_names_are_text() -> None:
    workers = [(name, {"model": ATTACKS[i - 1]}) for i, name in enumerate(ATTACKS)]
    async with a_crowd(workers, rate=5.0) as crowd, a_browser() as browser:
        key = next(iter(crowd.fleet.relays))
        crowd.fleet.say(key, warnings=(ATTACKS[0],), warning_codes=(ATTACKS[1],))
        tab = await browser.tab(height=2000)
        await tab.open(crowd.url)
        console = console_of(crowd)
        await until(lambda: len(console.decisions.kept) >= 3, "sampled decisions")
        await tab.more(3)
        names = await tab.page.evaluate(
            "[...document.querySelectorAll('.tile .name')].map((one) => one.textContent)"
        )
        assert {one.replace("\u202e", "\ufffd") for one in ATTACKS} <= set(names)
        for one in await tab.page.locator("#decisions summary").all():
            await one.click()
        await tab.page.locator(".tile").first.click()
        assert await tab.page.evaluate("window.hacked") is None
        assert await tab.page.locator("main img, main script").count() == 0
        assert await tab.page.evaluate("document.documentElement.scrollWidth") == 1400
        await tab.shot("hostile")
        assert tab.said == []


async def test_a_queue_shows_its_bands_and_tenants() -> None:
    full: dict[str, Any] = {"total_slots": 1, "model": "m"}
    workers = [(f"busy-{i}", full) for i in range(2)]
    queue = QueueSettings(timeout_s=60.0)
    async with a_crowd(workers, rate=0.0, queue=queue) as crowd, a_browser() as browser:
        tab = await browser.tab()
        await tab.open(crowd.url)
        calls = [
            asyncio.create_task(
                crowd.client.route(token_ids=[i] * 64, tenant=f"tenant-{i % 2}", timeout_s=60.0)
            )
            for i in range(9)
        ]
        await until(lambda: len(crowd.app.admission.queue) >= 5, "waiting requests")
        await tab.more(3)
        waiting = (await crowd.client.list_queue()).waiting
        assert waiting == len(crowd.app.admission.queue)
        assert (await tab.texts("#queue-sum"))[0].startswith(f"{waiting} requests wait here")
        text = (await tab.texts("#bands"))[0]
        assert "tenant-0" in text
        assert "tenant-1" in text
        assert "wait for a worker with room" in (await tab.texts("#verdict"))[0]
        await tab.page.locator("#queue").scroll_into_view_if_needed()
        await tab.shot("queue")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_browser_signs_in_and_out(tmp_path: Path) -> None:
    file = write_keys(tmp_path, identity("night shift", rights=("observe",)))
    keys = KeysSettings(file=file)
    async with a_crowd(many(3), rate=0.0, keys=keys) as crowd, a_browser() as browser:
        tab = await browser.tab(900, 700)
        await tab.page.goto(crowd.url)
        await tab.page.fill("#token", "wrong")
        await tab.page.keyboard.press("Enter")
        await tab.until("document.getElementById('sign-in-error').textContent !== ''")
        assert await tab.faults() == []
        await tab.shot("sign-in")
        assert all("401" in one for one in tab.said)  # the browser's own lines
        tab.said.clear()
        await tab.page.fill("#token", "night shift-token")
        await tab.page.keyboard.press("Enter")
        await tab.drawn(1)
        assert await tab.page.evaluate("document.cookie") == ""
        (cookie,) = await tab.page.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        await tab.page.reload()
        await tab.drawn(1)
        assert tab.said == []
        await tab.page.click("#sign-out")
        await tab.page.wait_for_selector("#token")
        await tab.until("document.getElementById('console').hidden")


async def test_a_page_says_that_its_router_is_gone_and_comes_back() -> None:
    async with a_browser() as browser:
        tab = await browser.tab()
        app: RouterApp | None = None
        async with a_crowd(many(3), rate=0.0) as crowd:
            app = crowd.app
            await tab.open(crowd.url)
        assert app is not None
        await tab.until("document.body.classList.contains('stale')")
        assert "lost" in await tab.page.inner_text("#link")
