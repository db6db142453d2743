"""Metrics pages whose names and labels were on earlier pages, beside those that are new."""

import random
import tracemalloc
from collections.abc import Iterable

import pytest
from prometheus_client.samples import Sample

from events.engines.numbers import OWN_VALUE_MAX
from events.engines.pages import metrics_page
from events.engines.pages.load import LoadUnreadable
from events.engines.pages.metrics_page import Heads, Page, own_numbers
from events.engines.vllm.pages import vllm_loads
from tests.stage.engine_pages import VLLM_DP_PAGE, VLLM_PAGE

NAMES = ("running", "waiting", "info")


@pytest.fixture(autouse=True)
def heads(monkeypatch: pytest.MonkeyPatch) -> Heads:
    """Those that the pages of a test have, none at first."""
    heads = Heads()
    monkeypatch.setattr(metrics_page, "HEADS", heads)
    return heads


def samples(text: str, names: Iterable[str] = NAMES) -> list[Sample] | str:
    """Their values as text, in which a number is as large as it is; or why there are none."""
    try:
        page = Page(text, names)
    except LoadUnreadable as error:
        return str(error)
    return [one._replace(value=_text(one.value)) for name in names for one in page.samples(name)]


def _text(value: float) -> str:
    is_large = isinstance(value, int) and abs(value) >= 10**15
    return str(value) if is_large else repr(float(value))


VALUES = [
    "7", "+7", "-7", "007", "0.25", "7.0", "1e3", "1e+03", "1E3", "2.5e-05", "1e99", "1e400", "NaN",
    "nan", "Inf", "+Inf", "-Inf", "inf", "infinity", "9" * 15, "9" * 16, "1" * 400, "1_000", "0x10",
    "1.", ".5", "7 ", "7\t", "7 1700000000000", "7 8 9", "", "x", "--7", "7 # {a=\"b\"} 1",
    "\N{ARABIC-INDIC DIGIT SEVEN}",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "head",
    [
        'running{engine="0"}',
        'running{engine="0",model_name="a } b"}',
        'running{engine="0",model_name="a \\" } 5"}',
        'running{engine="0",model_name="open} ',
        'running{engine="0"',
        "running{}",
        "running",
        'running {engine="0"}',
        'running{engine="0"} ',
        'running{engine="0",priority="1"}',
        'running{engine="0",engine="1"}',
        'running{engine="0"} 3}',
    ],
)
def test_a_known_head_changes_no_answer(head: str, value: str, heads: Heads) -> None:
    line = f"{head} {value}\n"
    fresh = samples(line)
    heads.samples.clear()
    samples(f"{head} 1\n")
    samples(f"{head} {value}\n")
    assert samples(line) == fresh


def test_labels_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'running{{engine="{rank}"}} {{}}' for rank in range(8)]
    text = "# TYPE running gauge\n" + "\n".join(lines) + "\n"
    samples(text.replace("{}", "1"))
    monkeypatch.delattr(metrics_page, "text_string_to_metric_families")
    read = samples(text.replace("{}", "2.5"))
    assert not isinstance(read, str)
    assert [(one.labels["engine"], one.value) for one in read] == [
        (str(rank), "2.5") for rank in range(8)
    ]


def test_heads_that_never_come_again_take_no_more_than_their_room(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "HEADS_BYTES_MAX", 100_000)
    counts = []
    for number in range(1000):
        samples(f'running{{engine="{number}"}} 1\n')
        assert heads.bytes <= 100_000
        counts.append(len(heads.samples))
    assert 100 < max(counts) < 200
    assert counts.count(1) > 1, "all were forgotten, and others were kept"


def test_heads_take_the_memory_that_they_are_estimated_at(heads: Heads) -> None:
    lines = [line for line in VLLM_PAGE.splitlines() if line.startswith("vllm:")]
    names = {line.partition("{")[0] for line in lines}
    tracemalloc.start()
    try:
        for number in range(200):
            samples("\n".join(lines).replace('engine="0"', f'engine="{number}"'), names)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(heads.samples) == 200 * len(lines)
    assert 0.4 < heads.bytes / used < 2.5


def test_each_rank_of_a_page_of_a_thousand_is_known(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f'running{{engine="{rank}"}} 1\n' for rank in range(1024))
    samples(text)
    assert len(heads.samples) == 1024
    monkeypatch.delattr(metrics_page, "text_string_to_metric_families")
    assert len(samples(text)) == 1024


def test_the_first_line_and_a_last_one_without_an_end_are_read() -> None:
    assert samples("running 1\nwaiting 2") == samples("# other\nrunning 1\nwaiting 2\n")


@pytest.mark.parametrize("seed", range(4))
def test_a_page_with_random_bytes_in_it_is_read_as_by_the_parser_alone(
    seed: int, heads: Heads
) -> None:
    rng = random.Random(seed)
    names = {line.partition("{")[0] for line in VLLM_PAGE.splitlines() if line[:1] != "#"}
    for _ in range(100):
        text = list(VLLM_PAGE)
        for _ in range(rng.randint(0, 3)):
            text[rng.randrange(len(text))] = rng.choice('{}",= \n1e#')
        page = "".join(text)
        known = samples(page, names)
        heads.samples.clear()
        assert known == samples(page, names)
        samples(VLLM_PAGE, names)


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        ("temperature -3.5", {None: -3.5}),
        ('temperature{gpu="0"} 61\ntemperature{gpu="1"} 70', {None: 70.0}),
        ('temperature{engine="0"} 61\ntemperature{engine="3"} 70', {0: 61.0, 3: 70.0}),
        ('temperature{engine="all"} 61', {None: 61.0}),
        ('temperature{priority="1"} 61\ntemperature{priority=""} 7', {None: 7.0}),
        ('temperature{priority="1"} 61\ntemperature{priority="2"} 7', {None: 61.0}),
        ("temperature NaN", {}),
        ("temperature +Inf", {}),
        ('temperature{gpu="0"} NaN\ntemperature{gpu="1"} 70', {None: 70.0}),
        ("temperature 1e19", {}),
        (f"temperature {'9' * 400}", {}),
        ("temperatures 61", {}),
        ("", {}),
    ],
)
def test_an_own_number_is_the_largest_sample_of_each_rank_or_absent(
    lines: str, read: dict[int | None, float]
) -> None:
    numbers = own_numbers(lines.encode(), {"celsius": "temperature"}, "engine")
    assert numbers == {rank: {"celsius": number} for rank, number in read.items()}


@pytest.mark.parametrize("metric", ["stops_total", "stops_sum", "stops_count"])
def test_an_own_number_that_is_a_counter_is_added_up_within_its_rank(metric: str) -> None:
    page = (
        f'{metric}{{engine="0",reason="length"}} 3\n{metric}{{engine="0",reason="stop"}} 4.5\n'
        f'{metric}{{engine="1",reason="stop"}} 5\n'
    )
    wanted = {"stops": metric, "none": "no_such_total"}
    assert own_numbers(page.encode(), wanted, "engine") == {0: {"stops": 7.5}, 1: {"stops": 5.0}}
    most = f'{metric}{{reason="a"}} {OWN_VALUE_MAX}\n'
    assert own_numbers(most.encode(), wanted, "engine") == {None: {"stops": OWN_VALUE_MAX}}
    page = most + most.replace('"a"', '"b"')
    assert own_numbers(page.encode(), wanted, "engine") == {}


def test_own_numbers_of_a_real_page_are_those_of_its_ranks() -> None:
    wanted = {"preempted": "vllm:num_preemptions_total", "waits": "vllm:num_requests_waiting"}
    loads = vllm_loads(VLLM_DP_PAGE)
    assert own_numbers(VLLM_DP_PAGE.encode(), wanted, "engine") == {
        rank: {"preempted": float(load.preemptions), "waits": float(load.waiting)}
        for rank, load in loads.items()
    }
