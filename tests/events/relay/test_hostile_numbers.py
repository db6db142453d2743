"""Whatever numbers an engine tells: its pages are read or unreadable, and heartbeats go out."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.samples import Sample

from events.engines.events import LoadSample
from events.engines.pages import metrics_page
from events.engines.pages.load import BLOCK_SIZE_MAX, COUNT_MAX, EngineIdentity, LoadUnreadable
from events.engines.pages.metrics_page import LINES_MAX
from events.engines.sglang.pages import (
    sglang_identity,
    sglang_load_stat,
    sglang_loads,
    sglang_metrics,
)
from events.engines.vllm import pages as vllm_pages
from events.engines.vllm.pages import vllm_identity, vllm_loads
from events.plane.facts import encode_heartbeat
from events.plane.settings import EngineSettings
from events.relay.relay import Relay
from tests.stage.engine_pages import SGLANG_LOADS, SGLANG_PAGE, VLLM_PAGE
from tests.stage.wire import Wire

TEXTS = st.sampled_from(
    [
        *("NaN", "nan", "Inf", "+Inf", "-Inf", "inf", "-0.0", "-1", "0", "1", "0.5", "1e30"),
        *("1e308", "1e400", "1e-400", str(2**31 - 1), str(2**31), str(2**53), str(2**63)),
        *(str(2**64), "9" * 400, "-" + "9" * 400, "1" + "0" * 5000, "0x10", "1_000", "", "None"),
    ]
) | st.floats().map(repr)
INTEGERS = st.sampled_from(
    [-(10**400), -(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63, 10**30, 10**400]
) | st.integers(0, 2**31)
SIZES = st.sampled_from([None, 1, 16, 65536])

SERVER_INFO = {
    "page_size": 16,
    "dp_size": 1,
    "max_total_num_tokens": 1000,
    "max_running_requests": 8,
    "context_length": 4096,
    "chunked_prefill_size": 2048,
    "max_prefill_tokens": 16384,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
    "kv_events": {"block_size": 16},
    "internal_states": [{"effective_max_running_requests_per_dp": 8}],
}


@cache
def a_relay(block_size: int | None) -> Relay:
    engine = EngineSettings(
        id="w", engine="vllm", address="http://127.0.0.1:1", block_size=block_size
    )
    relay = Relay(engine, Wire(), fleet="f", clock=lambda: 100.0, rng=random.Random(1))
    relay._context.destroy()
    relay._heartbeats._coded_warnings = lambda _shell: []  # type: ignore[method-assign]  # they need a loop
    return relay


def has_heartbeats(
    loads: Mapping[int, LoadSample], who: EngineIdentity, wanted_size: int | None
) -> None:
    """With this load and identity, a relay's heartbeats are whole and readable."""
    relay = a_relay(wanted_size)
    shell = relay._shells[0]
    for load in loads.values():
        shell.load = load
        if load.process_start_s is not None:
            shell.rank.on_process_start(load.process_start_s, 100.0)
        heartbeat = relay._heartbeats.heartbeat(shell, 100.0)
        encode_heartbeat(heartbeat)
        assert heartbeat.numbers == load.numbers
        for field, told in (
            ("max_model_len", who.max_model_len or 0),
            ("total_slots", who.total_slots),
            ("token_budget", who.token_budget),
            ("total_blocks", who.total_blocks),
            ("bootstrap_port", who.bootstrap_port or 0),
        ):
            encode_heartbeat(msgspec.structs.replace(heartbeat, **{field: told}))


def with_values(page: str, values: Mapping[int, str]) -> str:
    """The page with other values in the lines of these numbers, of those that are read."""
    lines = page.splitlines()
    wanted = [i for i, line in enumerate(lines) if re.match(r"(vllm|sglang|process_start)", line)]
    for number, value in values.items():
        i = wanted[number % len(wanted)]
        lines[i] = f"{lines[i].rpartition(' ')[0]} {value}"
    return "\n".join(lines) + "\n"


VALUES = st.dictionaries(st.integers(0, 500), TEXTS, min_size=1, max_size=40)


@pytest.mark.parametrize(("read", "page"), [(vllm_loads, VLLM_PAGE), (sglang_metrics, SGLANG_PAGE)])
def test_every_value_of_a_page_may_be_hostile(
    read: Callable[[str], Mapping[int, LoadSample]], page: str
) -> None:
    @settings(derandomize=True, deadline=None, max_examples=150)
    @given(values=VALUES, labels=TEXTS, size=SIZES)
    def holds(values: dict[int, str], labels: str, size: int | None) -> None:
        hostile = with_values(page, values)
        for text in (hostile, re.sub(r'(_size|blocks|_tokens)="\d+"', rf'\1="{labels}"', hostile)):
            with suppress(LoadUnreadable):
                has_heartbeats(read(text), EngineIdentity(), size)

    holds()


@pytest.mark.parametrize("value", ["1e30", "NaN", "Inf", "9" * 400, str(2**31)])
def test_a_count_that_no_heartbeat_takes_is_unreadable(value: str) -> None:
    for name, page, read in (
        ("vllm:num_requests_running", VLLM_PAGE, vllm_loads),
        ("vllm:num_requests_waiting", VLLM_PAGE, vllm_loads),
        ("vllm:kv_cache_usage_perc", VLLM_PAGE, vllm_loads),
        ("sglang:num_running_reqs", SGLANG_PAGE, sglang_metrics),
        ("sglang:num_used_tokens", SGLANG_PAGE, sglang_metrics),
    ):
        text = re.sub(rf"^({name}(?:{{.*}})?) .*$", rf"\1 {value}", page, flags=re.MULTILINE)
        assert text != page
        with pytest.raises(LoadUnreadable, match=name):
            read(text)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data(), page_size=st.sampled_from([1, 16, BLOCK_SIZE_MAX]), size=SIZES)
def test_every_number_of_sglangs_loads_may_be_hostile(
    data: st.DataObject, page_size: int, size: int | None
) -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(one) for key, one in value.items()}
        if isinstance(value, list):
            return [hostile(one) for one in value]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return data.draw(INTEGERS) if is_number and data.draw(st.booleans()) else value

    document = json.dumps(hostile(json.loads(SGLANG_LOADS)))
    with suppress(LoadUnreadable):
        has_heartbeats(sglang_loads(document, page_size), EngineIdentity(), size)
    with suppress(LoadUnreadable):
        load = LoadSample(block_size=1)
        has_heartbeats({0: load}, sglang_identity(json.dumps(hostile(SERVER_INFO))), size)
    models = {"data": [{"id": "m", "max_model_len": data.draw(INTEGERS)}]}
    with suppress(LoadUnreadable):
        has_heartbeats({0: LoadSample()}, vllm_identity(json.dumps(models)), size)
    limits = {"max_num_seqs": data.draw(INTEGERS), "max_num_batched_tokens": data.draw(INTEGERS)}
    info = json.dumps({"vllm_config": {"scheduler_config": limits}})
    with suppress(LoadUnreadable):
        who = vllm_identity('{"data": [{"id": "m"}]}', None, None, info)
        has_heartbeats({0: LoadSample()}, who, size)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    numbers=st.lists(st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, 2**31]), min_size=5,
                     max_size=8),
    size=SIZES,
)  # fmt: skip
def test_every_number_of_a_load_stat_may_be_hostile(numbers: list[int], size: int | None) -> None:
    with suppress(LoadUnreadable):
        _, load = sglang_load_stat(msgspec.msgpack.encode(["LoadStat", *numbers]), 1)
        has_heartbeats({0: load}, EngineIdentity(), size)


def test_the_largest_numbers_are_read() -> None:
    stat = ["LoadStat", COUNT_MAX, COUNT_MAX, COUNT_MAX, COUNT_MAX, 0, 2**53, 2**53, COUNT_MAX]
    _, load = sglang_load_stat(msgspec.msgpack.encode(stat), 16)
    assert (load.running, load.total_blocks) == (COUNT_MAX, COUNT_MAX // 16)
    has_heartbeats({0: load}, EngineIdentity(), 1)


def many_ranks(count: int) -> str:
    lines = []
    for rank in range(count):
        labels = f'{{engine="{rank}",model_name="m"}}'
        lines += [
            f"vllm:num_requests_running{labels} 1",
            f"vllm:num_requests_waiting{labels} 2",
            f"vllm:kv_cache_usage_perc{labels} 0.5",
            f"vllm:num_preemptions_total{labels} 0",
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("count", [50, 500])
def test_each_sample_of_a_page_is_sorted_by_rank_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Counter[str]()
    rank_of = metrics_page.rank_of

    def counting(sample: Sample, label: str) -> int:
        looks[sample.name] += 1
        return rank_of(sample, label)

    monkeypatch.setattr(metrics_page, "rank_of", counting)
    monkeypatch.setattr(vllm_pages, "rank_of", counting)
    assert len(vllm_loads(many_ranks(count))) == count
    assert set(looks.values()) == {count}


def test_a_page_of_too_many_lines_is_unreadable_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_page, "LINES_MAX", 40)
    assert len(vllm_loads(many_ranks(10))) == 10
    with pytest.raises(LoadUnreadable, match="44 lines"):
        vllm_loads(many_ranks(11))
    monkeypatch.undo()
    monkeypatch.delattr(metrics_page, "text_string_to_metric_families")
    line = 'vllm:num_requests_running{engine="0"} 1\n'
    with pytest.raises(LoadUnreadable, match=f"{LINES_MAX + 1} lines"):
        vllm_loads(line * (LINES_MAX + 1))
