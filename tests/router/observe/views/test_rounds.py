"""Rounds: a whole and the ticks after it are the whole of the last round."""

import json
import random
from collections.abc import Callable, Generator
from typing import Any

import pytest

from router.decide.core.counts import Counts
from router.decide.core.progress import Pick
from router.decide.decision.decision import Decision
from router.observe.console.console import Console
from router.observe.views import rounds
from router.observe.views.rounds import TREE_S
from router.observe.views.shared_prefixes import SHARED_MIN
from tests.stage.console import Played, play
from tests.stage.fleet import Fleet, prompt


def read(message: bytes | None) -> tuple[str, dict[str, Any]]:
    assert message is not None
    head, data = message.decode().removesuffix("\n\n").split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def name(tile: dict[str, Any]) -> tuple[str, int]:
    return tile["worker_id"], tile["dp_rank"]


class Page:
    """What a page makes of messages."""

    def __init__(self) -> None:
        self.workers: dict[tuple[str, int], Any] = {}
        self.lists: dict[str, list[Any]] = {"decisions": [], "news": [], "points": []}
        self.summary: Any = None

    def take(self, message: bytes | None) -> None:
        kind, content = read(message)
        if kind == "whole":
            self.workers, self.lists = {}, {key: [] for key in self.lists}
        self.workers |= {name(tile): tile for tile in content["workers"]}
        for worker_id, rank in content.get("gone", ()):
            del self.workers[worker_id, rank]
        for key, kept in self.lists.items():
            kept += content[key]
        self.summary = content["summary"]


def ended(steps: Generator[None, None, bytes], between: Callable[[], None]) -> bytes:
    """The result of a generator. between: called between its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: bytes = end.value
            return result
        between()


def route(played: Played, count: int, **about: Any) -> None:
    """Requests as a router's desk has them watched."""
    fleet, counts = played.fleet, Counts(played.tally)
    for _ in range(count):
        due = played.watchers.watch.take()
        request = fleet.request(prompt(64), **about)
        counts.begin()
        pick = fleet.core.route(request, fleet.now_s, watch=due)
        assert isinstance(pick, Pick)
        counts.picked(pick)


async def test_a_late_page_and_an_early_one_end_up_alike() -> None:
    played = play()
    fleet, console, rng = played.fleet, played.console, random.Random(5)
    for i in range(40):
        fleet.add(f"w{i}")
    early, first = Page(), console.join(lambda: None)
    assert first is not None
    for second in range(25):
        fleet.turn(1.0, silent=[key for key in fleet.relays if key.worker_id in ("w3", "w9")])
        route(played, rng.randrange(5))
        if second == 8:
            fleet.core.drain("w5")
        await console.step()
        early.take(await first.next())
        late = console.join(lambda: None)
        assert late is not None
        page = Page()
        page.take(await late.next())
        assert page.workers == early.workers
        assert page.summary == early.summary
        assert page.lists["decisions"] == early.lists["decisions"][-64:]
        assert page.lists["news"] == early.lists["news"]
        assert page.lists["points"] == early.lists["points"]
        console.viewers.leave(late)
    assert early.workers["w5", 0]["drained"]
    assert early.workers["w3", 0]["stream_state"] == "silent"
    assert early.lists["decisions"]
    assert len(early.lists["points"]) == 2


def test_what_comes_between_the_steps_of_a_round_is_in_its_tick_or_the_next() -> None:
    played = play()
    fleet, console = played.fleet, played.console
    fleet.add("a")
    made, page = console.rounds, Page()
    watched = 0

    def watch() -> None:
        nonlocal watched
        watched += 1
        decision = fleet.core.decide(fleet.request(prompt(64)), fleet.now_s)
        console.decisions.watch(decision)
        console.prefixes.watch(decision)

    for _ in range(SHARED_MIN):
        watch()
    list(made.write(fleet.now_s))
    page.take(made.whole())
    for watches in (True, False):
        fleet.turn(TREE_S)
        wholes = [made.whole()]

        def between(watches: bool = watches, wholes: list[bytes] = wholes) -> None:
            wholes.append(made.whole())
            if watches:
                watch()

        page.take(ended(made.write(fleet.now_s), between))
        assert len(wholes) > 2, "a step for the tiles, and one for the tree"
        assert len(set(wholes)) == 1
    late = Page()
    late.take(made.whole())
    assert page.lists == late.lists
    assert [each["number"] for each in late.lists["decisions"]] == [*range(1, watched + 1)]


async def test_what_a_round_that_failed_would_have_shown_is_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = play()
    fleet, console = played.fleet, played.console
    key = fleet.add("a")
    viewer, page = console.join(lambda: None), Page()
    assert viewer is not None
    await console.step()
    page.take(await viewer.next())
    fleet.say(key, running=7)
    monkeypatch.setattr(rounds, "summary_of", None)
    with pytest.raises(TypeError):
        await console.step()
    monkeypatch.undo()
    await console.step()
    page.take(await viewer.next())
    late = Page()
    late.take(console.rounds.whole())
    assert page.workers == late.workers
    assert late.workers["a", 0]["running"] == 7


async def test_a_worker_that_goes_leaves_the_page() -> None:
    played = play()
    fleet, console = played.fleet, played.console
    gone = fleet.add("gone")
    for i in range(4):
        fleet.add(f"stays-{i}")
    viewer, page = console.join(lambda: None), Page()
    assert viewer is not None
    await console.step()
    page.take(await viewer.next())
    assert len(page.workers) == 5
    fleet.turn(40.0, silent=[gone])
    await console.step()
    page.take(await viewer.next())
    assert len(page.workers) == 4
    assert page.lists["news"][-1]["now"] == "gone"


async def test_a_tile_that_did_not_change_is_not_sent_again() -> None:
    played = play()
    for i in range(50):
        played.fleet.add(f"w{i}")
    viewer = played.console.join(lambda: None)
    assert viewer is not None
    await played.console.step()
    assert len(read(await viewer.next())[1]["workers"]) == 50
    played.fleet.route(prompt(64))
    await played.console.step()
    kind, content = read(await viewer.next())
    assert kind == "tick"
    assert len(content["workers"]) == 1


async def test_without_viewers_no_tile_is_written_and_nothing_is_sampled() -> None:
    played = play()
    played.fleet.add("a")
    console = played.console
    for _ in range(3):
        played.fleet.turn(1.0)
        await console.step()
    assert console.rounds.tiles_written == 0
    assert not played.watchers.watch
    viewer = console.join(lambda: None)
    assert viewer is not None
    await console.step()
    assert console.rounds.tiles_written == 1
    assert played.watchers.watch
    console.viewers.leave(viewer)
    await console.step()
    assert not played.watchers.watch
    assert not console.rounds.is_fresh


async def test_samples_come_to_about_two_a_second_however_many_decisions_there_are() -> None:
    played = play()
    for i in range(4):
        played.fleet.add(f"w{i}", total_slots=None, total_blocks=None)
    console: Console = played.console
    viewer = console.join(lambda: None)
    assert viewer is not None
    for second in range(60):
        if second == 20:
            before = console.sampled
        await console.step()
        await viewer.next()
        route(played, 50)
        played.fleet.turn(1.0)
    assert 40 <= console.sampled - before <= 140  # 2 a second, within a factor of SHARE_STEP


async def test_a_decision_that_cannot_be_shown_is_no_requests_fault() -> None:
    played = play()
    played.fleet.add("a")
    failures: list[Exception] = []
    viewer = played.console.join(lambda: None)
    await played.console.step()
    watch = played.watchers.watch
    assert viewer is not None
    watch._on_failure = failures.append

    def fails(_decision: Decision) -> None:
        raise ValueError("no")

    played.console.decisions.watch = fails  # type: ignore[method-assign]
    for sampled in watch._watchers:
        sampled.left = 0
    route(played, 1)
    assert len(failures) == 1
    assert watch.failures == 1


def test_the_fleet_of_a_console_is_only_read() -> None:
    fleet = Fleet()
    fleet.add("a")
    before = fleet.loads()
    played = play(fleet)
    for _ in played.console.rounds.write(fleet.now_s):
        pass
    assert fleet.loads() == before
