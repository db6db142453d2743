"""Scrapes that come at once: how many are made, what each of them answers."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.observe.metrics import scrape as scrapes_module
from router.observe.metrics.families import export, gauge, gauges
from router.observe.metrics.scrape import OPENMETRICS, TURN_ROWS, Scrapes


class Counted:
    """A collector whose one value is how often it was read."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails = False
        self.was_read = asyncio.Event()

    def collect(self) -> Iterator[Metric]:
        if self.fails:
            raise RuntimeError("no values")
        self.reads += 1
        self.was_read.set()
        yield gauge("reads", "How often.", self.reads)


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def scrapes(counted: Counted) -> Scrapes:
    registry = CollectorRegistry()
    export(registry, counted.collect)
    return Scrapes(registry)


def value(answer: tuple[bytes, str]) -> float:
    (family,) = text_string_to_metric_families(answer[0].decode())
    return family.samples[0].value


async def test_scrapes_that_come_one_after_another_have_values_of_their_own(
    scrapes: Scrapes,
) -> None:
    assert [value(await scrapes.text()) for _ in range(3)] == [1, 2, 3]


async def test_scrapes_that_come_during_another_share_the_next(
    scrapes: Scrapes, counted: Counted
) -> None:
    first = asyncio.create_task(scrapes.text())
    await counted.was_read.wait()
    rest = [asyncio.create_task(scrapes.text()) for _ in range(1000)]
    assert value(await first) == 1
    assert {value(answer) for answer in await asyncio.gather(*rest)} == {2}
    assert counted.reads == 2


async def test_a_client_that_leaves_takes_the_answer_from_nobody(
    scrapes: Scrapes, counted: Counted
) -> None:
    leaver, other = (asyncio.create_task(scrapes.text()) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    assert value(await other) == 1
    assert leaver.cancelled()
    assert counted.reads == 1


async def test_each_format_has_scrapes_of_its_own(scrapes: Scrapes) -> None:
    headers = ("", "text/plain", f"{OPENMETRICS}; version=1.0.0", f"{OPENMETRICS}; version=9; q=1")
    answers = await asyncio.gather(*map(scrapes.text, headers))
    assert [content_type.partition(";")[0] for _, content_type in answers] == [
        "text/plain", "text/plain", OPENMETRICS, OPENMETRICS,
    ]  # fmt: skip
    assert [answer[0].endswith(b"# EOF\n") for answer in answers] == [False, False, True, True]
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (f"{OPENMETRICS}; version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", OPENMETRICS),
        (f"{OPENMETRICS}; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain"),
        (f"{OPENMETRICS}; version=one", "text/plain"),
        (f"text/plain; version=1.0.0, {OPENMETRICS}", "text/plain"),
        ("*/*", "text/plain"),
        ("nonsense", "text/plain"),
    ],
)
async def test_the_format_is_what_the_header_wants(
    scrapes: Scrapes, accept: str, content_type: str
) -> None:
    assert (await scrapes.text(accept))[1].startswith(content_type)


async def test_a_scrape_that_fails_says_so_and_the_next_one_is_made(
    scrapes: Scrapes, counted: Counted
) -> None:
    counted.fails = True
    failed = await asyncio.gather(scrapes.text(), scrapes.text(), return_exceptions=True)
    assert [str(error) for error in failed] == ["no values", "no values"]
    counted.fails = False
    assert value(await scrapes.text()) == 1


async def test_other_work_has_its_turn_while_a_large_registry_is_read() -> None:
    read, work = list[int](), list[int]()

    def large() -> Iterator[Metric]:
        for number in range(4):
            rows = {(str(row),): row for row in range(TURN_ROWS // 2)}
            read.append(number)
            yield gauges(f"family_{number}", "Of many rows.", ["row"], rows)

    async def works() -> None:
        while len(read) < 4:
            work.append(len(read))
            await asyncio.sleep(0)

    registry = CollectorRegistry()
    export(registry, large)
    worker = asyncio.create_task(works())
    content, _ = await Scrapes(registry).text()
    await worker
    assert content.count(b"\nfamily_") == 2 * TURN_ROWS
    assert work[-1] == 2, "between the second family and the third"


async def test_collectors_of_one_registry_share_a_family() -> None:
    def part(what: str) -> Iterator[Metric]:
        yield gauges("parts", "Of several parts.", ["what"], {(what,): 1})

    registry = CollectorRegistry()
    for what in "ab":
        export(registry, part, what)
    content, _ = await Scrapes(registry).text()
    (family,) = text_string_to_metric_families(content.decode())
    assert [sample.labels for sample in family.samples] == [{"what": "a"}, {"what": "b"}]
    assert content.count(b"# TYPE") == 1


async def test_a_pause_follows_a_scrape_in_proportion_and_with_a_bound(
    scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    now_s, took_s, slept_s = 100.0, 0.125, list[float]()

    async def written(encode: object, values: object) -> bytes:
        nonlocal now_s
        now_s += took_s
        return b""

    async def sleep(delay_s: float) -> None:
        slept_s.append(max(delay_s, 0.0))

    monkeypatch.setattr(loop, "time", lambda: now_s)
    monkeypatch.setattr(scrapes_module.asyncio, "to_thread", written)
    monkeypatch.setattr(scrapes_module.asyncio, "sleep", sleep)
    await scrapes.text()
    await scrapes.text()
    took_s = 60.0
    await scrapes.text()
    await scrapes.text()
    assert slept_s == [0.0, 0.125, 0.125, 1.0]


SERIES = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz")), st.integers(0, 9), max_size=8
)


@given(st.lists(SERIES, min_size=1, max_size=3))
async def test_series_of_several_registries_are_written_once_and_the_first_one_counts(
    registries: list[dict[tuple[str, str], int]],
) -> None:
    scrapes: Scrapes | None = None
    expected: dict[tuple[str, str], int] = {}
    for values in registries:
        registry = CollectorRegistry()
        for name in sorted({name for name, _ in values}):
            gauge = Gauge(name, "One of several.", ["label"], registry=registry)
            for (owner, label), number in values.items():
                if owner == name:
                    gauge.labels(label).set(number)
        expected = values | expected
        if scrapes is None:
            scrapes = Scrapes(registry)
        else:
            scrapes.add(registry)
    assert scrapes is not None
    body, _ = await scrapes.text()
    families = list(text_string_to_metric_families(body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [sample for family in families for sample in family.samples]
    written = [((one.name, one.labels["label"]), one.value) for one in samples]
    assert sorted(written) == sorted(expected.items())
