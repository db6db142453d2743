"""Load and identity from the documents of real engines, of older ones, and of none."""

import base64
import json
import re
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.engines.events import LoadSample
from events.engines.pages.load import DOCUMENT_BYTES_MAX, EngineIdentity, LoadUnreadable
from events.engines.sglang.pages import (
    sglang_identity,
    sglang_load_stat,
    sglang_loads,
    sglang_metrics,
)
from events.engines.vllm.pages import vllm_identity, vllm_loads
from tests.stage.engine_pages import (
    SGLANG,
    SGLANG_LOADS,
    SGLANG_PAGE,
    VLLM,
    VLLM_DP_PAGE,
    VLLM_PAGE,
)

# vLLM's page


def test_a_vllm_page_tells_the_load_of_its_rank() -> None:
    loads = vllm_loads(VLLM_PAGE)
    assert list(loads) == [0]
    load = loads[0]
    # 64 blocks, of which one is vLLM's own; the gauge says 0.95238 = 60 / 63.
    assert load.used_blocks == pytest.approx(60, abs=1e-9)
    assert load == LoadSample(
        running=5,
        waiting=7,
        used_blocks=load.used_blocks,
        total_blocks=63,
        block_size=32,
        preemptions=0,
        model="tiny",
        process_start_s=1.79522645348e9,
        numbers={
            "prefix_hit_tokens": 320.0,
            "prefix_query_tokens": 6676.0,
            "first_tokens": 47.0,
            "first_token_seconds": 0.6785540580749512,
        },
    )


def test_a_vllm_page_of_two_ranks_tells_each_its_own_and_no_sum() -> None:
    # num_gpu_blocks says 128, for both together.
    assert 'num_gpu_blocks="128"' in VLLM_DP_PAGE
    loads = vllm_loads(VLLM_DP_PAGE)
    assert sorted(loads) == [0, 1]
    assert [loads[rank].total_blocks for rank in (0, 1)] == [63, 63]
    assert [round(loads[rank].used_blocks or 0, 9) for rank in (0, 1)] == [12, 11]
    assert [loads[rank].running for rank in (0, 1)] == [1, 1]
    assert [loads[rank].preemptions for rank in (0, 1)] == [1, 1]
    assert [loads[rank].numbers["prefix_hit_tokens"] for rank in (0, 1)] == [160, 224]


def test_without_a_size_in_tokens_the_sum_of_blocks_is_shared_out() -> None:
    page = re.sub(r'kv_cache_size_tokens="\d+"', 'kv_cache_size_tokens="None"', VLLM_DP_PAGE)
    assert [load.total_blocks for load in vllm_loads(page).values()] == [63, 63]


def test_a_block_that_context_parallelism_widens_counts_in_its_full_width() -> None:
    page = VLLM_PAGE.replace(
        'effective_attention_block_size="32"', 'effective_attention_block_size="64"'
    )
    load = vllm_loads(page)[0]
    assert (load.block_size, load.total_blocks) == (64, 31)
    page = VLLM_PAGE.replace('effective_attention_block_size="32",', "")
    assert vllm_loads(page)[0].block_size == 32


def test_an_old_vllm_page_is_read_under_its_old_names() -> None:
    page = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:gpu_prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 40.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="101"} 1.0
"""
    assert vllm_loads(page) == {
        0: LoadSample(
            running=2,
            waiting=1,
            used_blocks=50.0,
            total_blocks=100,
            block_size=16,
            preemptions=3,
            model="m",
            numbers={"prefix_hit_tokens": 40.0, "prefix_query_tokens": 100.0},
        )
    }


def test_a_page_without_rank_labels_is_rank_zero() -> None:
    page = 'vllm:num_requests_running{model_name="m"} 2\nvllm:num_requests_waiting 1\n'
    assert vllm_loads(page) == {0: LoadSample(running=2, waiting=1, model="m")}


@given(
    states=st.dictionaries(
        st.sampled_from(["awake", "weights_offloaded", "discard_all", "other"]),
        st.sampled_from([0.0, 1.0]),
    )
)
def test_a_sleeping_engine_says_so_and_has_blocks_at_level_0_alone(
    states: dict[str, float],
) -> None:
    load = vllm_loads(
        'vllm:num_requests_running{engine="3"} 0\nvllm:num_requests_waiting{engine="3"} 0\n'
        + "".join(
            f'vllm:engine_sleep_state{{engine="3",sleep_state="{name}"}} {value}\n'
            for name, value in states.items()
        )
    )[3]
    paused = states.get("weights_offloaded") == states.get("discard_all") == 0.0
    assert load.asleep == (states.get("awake") == 0.0)
    assert load.emptied == (load.asleep and not paused)


def test_lines_of_other_metrics_are_not_even_parsed() -> None:
    broken = "vllm:e2e_request_latency_seconds_bucket{le= 1\nnonsense{{{ x\n"
    assert vllm_loads(broken + VLLM_PAGE) == vllm_loads(VLLM_PAGE)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("", "lacks vllm:num_requests_running"),
        ("<html>502 Bad Gateway</html>", "lacks vllm:num_requests_running"),
        (SGLANG_PAGE, "lacks vllm:num_requests_running"),
        ('vllm:num_requests_running{engine="0"} 1\n', "no vllm:num_requests_waiting"),
        ('vllm:num_requests_running{engine="0" 1\n', "metrics page"),
        ('vllm:num_requests_running{engine="0"} one\n', "metrics page"),
        ('vllm:num_requests_running{engine="x"} 1\n', "is no rank"),
        ('vllm:num_requests_running{engine="-1"} 1\n', "is no rank"),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n", "nan"),
        ("vllm:num_requests_running -1\nvllm:num_requests_waiting 1\n", "-1"),
        ("vllm:num_requests_running 1\nvllm:num_requests_waiting +Inf\n", "inf"),
    ],
)
def test_other_pages_are_unreadable_and_say_why(page: str, reason: str) -> None:
    with pytest.raises(LoadUnreadable, match=re.escape(reason)) as caught:
        vllm_loads(page)
    assert reason in caught.value.reason


@pytest.mark.parametrize("end", range(0, len(VLLM_PAGE), 97))
def test_a_page_cut_short_is_read_or_unreadable(end: int) -> None:
    with suppress(LoadUnreadable):
        assert vllm_loads(VLLM_PAGE[:end])[0].running == 5


# SGLang


def test_sglang_loads_tell_tokens_and_are_read_in_blocks() -> None:
    assert sglang_loads(SGLANG_LOADS, 16) == {
        0: LoadSample(
            running=5,
            waiting=9,
            used_blocks=80.0,
            total_blocks=128,
            block_size=16,
            total_slots=1024,
            numbers={"cache_hit_rate": 0.0, "waiting_prefill_tokens": 1377.0},
        )
    }


def test_sglang_loads_are_told_by_rank() -> None:
    document = {
        "loads": [{"dp_rank": r, "num_running_reqs": r, "num_waiting_reqs": 0} for r in (0, 3)]
    }
    loads = sglang_loads(json.dumps(document), 1)
    assert {rank: load.running for rank, load in loads.items()} == {0: 0, 3: 3}
    assert loads[3].total_blocks is None


@pytest.mark.parametrize(
    "document",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"loads": []}',
        '{"loads": [{}]}',
        '{"loads": [{"num_running_reqs": -1, "num_waiting_reqs": 0}]}',
        '{"loads": [{"num_running_reqs": "1", "num_waiting_reqs": 0}]}',
        '{"loads": [{"num_running_reqs": 1}]}',
        '{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "cache_hit_rate": -0.5}]}',
        '{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "cache_hit_rate": 1e300}]}',
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_other_loads_are_unreadable(document: str | bytes) -> None:
    with pytest.raises(LoadUnreadable):
        sglang_loads(document, 16)


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_of_no_tokens_is_refused(page_size: int) -> None:
    with pytest.raises(LoadUnreadable, match="page size"):
        sglang_loads(SGLANG_LOADS, page_size)


def test_the_load_feed_is_read_as_its_generic_decode_says() -> None:
    frames = (SGLANG / "load_frames.jsonl").read_text().splitlines()
    decoded = (SGLANG / "load_frames.decoded.jsonl").read_text().splitlines()
    assert len(frames) == len(decoded) > 4
    for frame, plain in zip(frames, decoded, strict=True):
        stat = json.loads(plain)["batch"]
        rank, load = sglang_load_stat(base64.b64decode(json.loads(frame)["payload_b64"]), 16)
        assert rank == stat[5]
        assert (load.running, load.waiting) == (stat[1], stat[2])
        assert load.used_blocks == stat[3] / 16
        assert load.total_blocks == stat[4] // 16
        assert load.numbers == {"waiting_prefill_tokens": stat[6]}
        assert load.total_slots == stat[8]


def test_the_first_form_of_the_load_feed_tells_less() -> None:
    payload = msgspec.msgpack.encode(["LoadStat", 1, 2, 32, 2048, 3])
    assert sglang_load_stat(payload, 16) == (
        3,
        LoadSample(running=1, waiting=2, used_blocks=2.0, total_blocks=128, block_size=16),
    )


def test_a_longer_form_of_the_load_feed_is_read() -> None:
    payload = msgspec.msgpack.encode(["LoadStat", 1, 2, 32, 2048, 0, 5, 6, 7, 8, 9, "new", [1]])
    assert sglang_load_stat(payload, 16)[1].total_slots == 7


@pytest.mark.parametrize(
    "stat",
    [
        [],
        ["LoadStat"],
        ["LoadStat", 1, 2, 3, 4],
        ["Other", 1, 2, 3, 4, 5],
        ["LoadStat", -1, 2, 3, 4, 5],
        ["LoadStat", 1, "2", 3, 4, 5],
        {"type": "LoadStat"},
        None,
    ],
)
def test_other_load_stats_are_unreadable(stat: Any) -> None:
    with pytest.raises(LoadUnreadable, match="LoadStat"):
        sglang_load_stat(msgspec.msgpack.encode(stat), 16)


@pytest.mark.parametrize("offset", range(20))
def test_a_load_stat_cut_anywhere_is_unreadable(offset: int) -> None:
    payload = msgspec.msgpack.encode(["LoadStat", 1, 2, 32, 2048, 3, 1, 1, 1, 1, 1])
    with pytest.raises(LoadUnreadable):
        sglang_load_stat(payload[:offset], 16)


def test_a_sglang_page_is_the_fallback_and_agrees_with_its_loads() -> None:
    page, loads = sglang_metrics(SGLANG_PAGE)[0], sglang_loads(SGLANG_LOADS, 16)[0]
    assert (page.running, page.waiting) == (loads.running, loads.waiting) == (5, 9)
    assert (page.used_blocks, page.total_blocks, page.block_size) == (80.0, 128, 16)
    assert page.model == "tiny"


def test_gauges_repeated_for_each_priority_are_not_added_up() -> None:
    assert "sglang:num_running_reqs{" in SGLANG_PAGE
    assert len(re.findall(r"^sglang:num_running_reqs\{", SGLANG_PAGE, re.MULTILINE)) == 2
    assert sglang_metrics(SGLANG_PAGE)[0].running == 5


def test_an_old_sglang_page_is_read_with_the_page_size_from_elsewhere() -> None:
    page = """\
sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:num_grammar_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.25
sglang:max_total_num_tokens{model_name="m"} 6400.0
"""
    assert sglang_metrics(page, 64) == {
        0: LoadSample(
            running=3, waiting=3, used_blocks=25.0, total_blocks=100, block_size=64, model="m"
        )
    }
    assert sglang_metrics(page)[0].used_blocks is None


def test_a_sglang_page_of_many_ranks_tells_each_once() -> None:
    lines = [
        f'sglang:{name}{{dp_rank="{rank}",tp_rank="{tp}"}} {rank + 1}'
        for name in ("num_running_reqs", "num_queue_reqs")
        for rank in (0, 1)
        for tp in (0, 1)
    ]
    loads = sglang_metrics("\n".join(lines))
    assert {rank: (load.running, load.waiting) for rank, load in loads.items()} == {
        0: (1, 1),
        1: (2, 2),
    }


@pytest.mark.parametrize(
    "page", ["", VLLM_PAGE, "sglang:num_running_reqs 1\n", "sglang:num_running_reqs x\n"]
)
def test_other_sglang_pages_are_unreadable(page: str) -> None:
    with pytest.raises(LoadUnreadable):
        sglang_metrics(page)


# Identity


def test_vllm_says_its_model_its_adapters_and_its_version() -> None:
    identity = vllm_identity(
        (VLLM / "bytes-lora-priority" / "models.json").read_bytes(),
        b'{"version":"0.32.0"}',
        (VLLM / "dp2-connect" / "kv_event_sources.json").read_bytes(),
    )
    assert identity == EngineIdentity(
        model="tiny", lora_names=("tiny-lora",), max_model_len=512, version="0.32.0", dp_ranks=2
    )


def test_vllm_in_development_mode_says_how_many_requests_it_runs_at_once() -> None:
    models = {"data": [{"id": "a"}]}

    def scheduler(config: object) -> tuple[int | None, int | None]:
        info = json.dumps({"vllm_config": config, "vllm_env": {"VLLM_X": "1"}, "system_env": {}})
        identity = vllm_identity(json.dumps(models), None, None, info)
        assert identity.model == "a"
        return identity.total_slots, identity.token_budget

    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    assert scheduler({"scheduler_config": limits, "model_config": {}}) == (256, 8192)
    strange = {"max_num_seqs": "256", "max_num_batched_tokens": 2**40}
    for other in ({"scheduler_config": strange}, {"scheduler_config": None}, {}, "a text", None):
        assert scheduler(other) == (None, None)
    for flag in (True, 0, -1, 1.5):
        assert scheduler({"scheduler_config": {"max_num_seqs": flag}}) == (None, None)
    left_out = vllm_identity(json.dumps(models), None, None, "[")
    assert (left_out.model, left_out.total_slots) == ("a", None)
    assert left_out.troubles[0].startswith("the page /server_info can't be read: ")


def test_further_names_without_a_parent_are_aliases() -> None:
    models = {"data": [{"id": "a", "max_model_len": 9}, {"id": "b"}, {"id": "l", "parent": "a"}]}
    identity = vllm_identity(json.dumps(models))
    assert (identity.model, identity.aliases, identity.lora_names) == ("a", ("b",), ("l",))
    assert (identity.max_model_len, identity.version, identity.dp_ranks) == (9, None, None)


def test_sglang_says_all_of_itself() -> None:
    identity = sglang_identity(
        (SGLANG / "server_info.json").read_bytes(),
        (SGLANG / "models.json").read_bytes(),
        (SGLANG / "model_info.json").read_bytes(),
    )
    assert identity == EngineIdentity(
        model="tiny",
        max_model_len=4096,
        version="0.5.23",
        block_size=16,
        total_blocks=128,
        total_slots=1024,
        dp_ranks=1,
        priority_scheduling=True,
        low_priority_first=False,
    )


@pytest.mark.parametrize("mode", ["prefill", "decode", "null"])
def test_sglang_says_which_half_of_requests_it_serves(mode: str) -> None:
    info = json.loads((SGLANG / "server_info.json").read_bytes())
    info |= {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 9001}
    identity = sglang_identity(json.dumps(info))
    told = (None, None) if mode == "null" else (mode, 9001)
    assert (identity.role, identity.bootstrap_port) == told


def test_an_older_sglang_says_less() -> None:
    info = {"model_path": "org/model", "page_size": 1, "max_running_requests": 64, "dp_size": 4}
    assert sglang_identity(json.dumps(info)) == EngineIdentity(
        model="org/model", block_size=1, total_slots=16, dp_ranks=4
    )
    assert sglang_identity("{}") == EngineIdentity()
    chunked = '{"chunked_prefill_size": 4096, "max_prefill_tokens": 16384}'
    assert sglang_identity(chunked).token_budget == 4096
    unchunked = '{"chunked_prefill_size": -1, "max_prefill_tokens": 16384}'
    assert sglang_identity(unchunked).token_budget == 16384
    told = sglang_identity("{}", None, '{"model_path": "org/model"}')
    assert told.model == "org/model"


@pytest.mark.parametrize("document", ["", "[]", "{}", '{"data": []}', '{"data": [{"id": 1}]}'])
def test_other_model_lists_are_unreadable(document: str) -> None:
    with pytest.raises(LoadUnreadable, match="/v1/models"):
        vllm_identity(document)
    left_out = sglang_identity('{"version": "0.5.23"}', document)
    assert left_out.version == "0.5.23"
    assert "/v1/models" in left_out.troubles[0]


@pytest.mark.parametrize("document", ["", "[]", '{"page_size": "x"}', '{"page_size": -1}'])
def test_other_server_infos_are_unreadable(document: str) -> None:
    with pytest.raises(LoadUnreadable, match="/server_info"):
        sglang_identity(document)


def test_documents_beyond_the_limit_are_not_read() -> None:
    long = " " * (DOCUMENT_BYTES_MAX + 1)
    for read in (vllm_loads, sglang_metrics, vllm_identity, sglang_identity):
        with pytest.raises(LoadUnreadable, match=str(DOCUMENT_BYTES_MAX + 1)):
            read(long)
    with pytest.raises(LoadUnreadable, match=str(DOCUMENT_BYTES_MAX + 1)):
        sglang_load_stat(long.encode(), 16)


NOISE = st.text(alphabet='vllm:num_requests_running{}="0, \n1.eNa#\\', max_size=60)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(noise=NOISE, raw=st.binary(max_size=60), cut=st.integers(0, len(VLLM_PAGE)))
def test_noise_is_read_or_unreadable(noise: str, raw: bytes, cut: int) -> None:
    pages = [noise, "vllm:num_requests_running" + noise, VLLM_PAGE[:cut] + noise + VLLM_PAGE[cut:]]
    for page in pages:
        with suppress(LoadUnreadable):
            assert vllm_loads(page)
    for read in (lambda: sglang_load_stat(raw, 16), lambda: sglang_loads(raw, 16)):
        with pytest.raises(LoadUnreadable):
            read()
