"""Reads SGLang's documents about its load and identity. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from prometheus_client.samples import Sample

from events.engines.events import LoadSample
from events.engines.pages.load import (
    BLOCK_SIZE_MAX,
    DOCUMENT_BYTES_MAX,
    READ_ERRORS,
    SHARE_MAX,
    Count,
    EngineIdentity,
    LoadUnreadable,
    Name,
    Signed,
    TokenCounter,
    bounded,
    natural,
    optional_json,
    read_json,
    read_models,
    set_blocks,
)
from events.engines.pages.metrics_page import Page, share, whole


class _SglangLoad(Struct):
    num_running_reqs: Count
    num_waiting_reqs: Count
    dp_rank: Count | None = None
    num_used_tokens: Count | None = None
    max_total_num_tokens: Count | None = None
    max_running_requests: Count | None = None
    num_waiting_uncached_tokens: TokenCounter | None = None
    cache_hit_rate: Annotated[float, Meta(ge=0, le=SHARE_MAX)] | None = None


class _SglangLoads(Struct):
    loads: list[_SglangLoad]


def sglang_loads(document: bytes | str, page_size: int) -> dict[int, LoadSample]:
    """Load by rank from SGLang's /v1/loads; tokens are converted to blocks of `page_size` tokens.

    Preemptions and the process's start are not on the page. Further numbers: cache_hit_rate of the
    last interval, and waiting_prefill_tokens. Raises LoadUnreadable.
    """
    loads: dict[int, LoadSample] = {}
    for row in read_json(document, _SGLANG_LOADS, "/v1/loads").loads:
        load = LoadSample(
            running=row.num_running_reqs,
            waiting=row.num_waiting_reqs,
            total_slots=row.max_running_requests or None,
        )
        if row.num_waiting_uncached_tokens is not None:
            load.numbers["waiting_prefill_tokens"] = float(row.num_waiting_uncached_tokens)
        set_blocks(load, page_size, row.num_used_tokens, row.max_total_num_tokens)
        if row.cache_hit_rate is not None:
            load.numbers["cache_hit_rate"] = row.cache_hit_rate
        loads[row.dp_rank or 0] = load
    if not loads:
        raise LoadUnreadable("/v1/loads names no rank")
    return loads


class _LoadStat(Struct, array_like=True, tag="LoadStat"):
    num_running: Count
    num_waiting: Count
    num_tokens_used: Count
    max_total_num_tokens: Count
    dp_rank: Count | None  # last field of the older form
    num_waiting_uncached_tokens: TokenCounter | None = None
    num_total_tokens: TokenCounter | None = None
    max_running_requests: Count | None = None


def sglang_load_stat(payload: bytes, page_size: int) -> tuple[int, LoadSample]:
    """(rank, load) from one payload of SGLang's LoadStat feed, converted as in sglang_loads.

    num_total_tokens also counts waiting requests and is not used. Raises LoadUnreadable.
    """
    if len(payload) > DOCUMENT_BYTES_MAX:
        raise LoadUnreadable(
            f"the LoadStat message has {len(payload)} bytes, more than {DOCUMENT_BYTES_MAX}"
        )
    try:
        stat = _LOAD_STAT.decode(payload)
    except READ_ERRORS as error:
        raise LoadUnreadable(f"the LoadStat message can't be read: {error}") from None
    load = LoadSample(
        running=stat.num_running,
        waiting=stat.num_waiting,
        total_slots=stat.max_running_requests or None,
    )
    if stat.num_waiting_uncached_tokens is not None:
        load.numbers["waiting_prefill_tokens"] = float(stat.num_waiting_uncached_tokens)
    set_blocks(load, page_size, stat.num_tokens_used, stat.max_total_num_tokens)
    return stat.dp_rank or 0, load


_SGLANG_WAITING = (
    "sglang:num_queue_reqs",
    "sglang:num_grammar_queue_reqs",
    # Prefill/decode roles only: before a slot, or before the KV cache has come.
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
_SGLANG_NAMES = (
    "process_start_time_seconds",
    "sglang:num_running_reqs",
    *_SGLANG_WAITING,
    "sglang:num_used_tokens",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
    "sglang:max_running_requests",
    "sglang:page_size",
    "sglang:num_retracted_requests_total",
    "sglang:cache_hit_rate",
)


def sglang_metrics(text: str, page_size: int | None = None) -> dict[int, LoadSample]:
    """Load by rank (label `dp_rank`; absent means 0) from SGLang's /metrics, for older releases.

    With priority scheduling every gauge appears once more for each priority; only priority="",
    their total, counts. `page_size` is used if the page has none (before 0.5.15). The gauges are
    updated every 40 decode steps, or after 30 s when idle. Raises LoadUnreadable.
    """
    page = Page(text, _SGLANG_NAMES)
    start_s = page.start_s()
    loads: dict[int, LoadSample] = {}
    for rank, running in page.by_rank("sglang:num_running_reqs", "dp_rank").items():

        def sample(name: str, rank: int = rank) -> Sample | None:
            return page.rank_sample(rank, "dp_rank", name)

        queues = [sample(name) for name in _SGLANG_WAITING]
        if queues[0] is None:
            raise LoadUnreadable(f"rank {rank} has no {_SGLANG_WAITING[0]}")
        load = LoadSample(
            running=whole(running),
            waiting=bounded(
                "the sum of the queues", sum(whole(queue) for queue in queues if queue is not None)
            ),
            model=running.labels.get("model_name"),
            process_start_s=start_s,
        )
        if slots := sample("sglang:max_running_requests"):
            load.total_slots = whole(slots) or None
        if retracted := sample("sglang:num_retracted_requests_total"):
            load.preemptions = whole(retracted)
        if hit_rate := sample("sglang:cache_hit_rate"):
            load.numbers["cache_hit_rate"] = share(hit_rate)
        tokens_a_page = sample("sglang:page_size")
        size = page_size if tokens_a_page is None else whole(tokens_a_page)
        total = sample("sglang:max_total_num_tokens")
        used = sample("sglang:num_used_tokens")
        usage = sample("sglang:token_usage")
        if size:
            total_tokens = None if total is None else whole(total)
            used_tokens: float | None = None
            if used is not None:
                used_tokens = whole(used)
            elif usage is not None and total_tokens is not None:
                used_tokens = share(usage) * total_tokens
            set_blocks(load, size, used_tokens, total_tokens)
        loads[rank] = load
    if not loads:
        raise LoadUnreadable("the metrics page lacks sglang:num_running_reqs")
    return loads


class _SglangState(Struct):
    effective_max_running_requests_per_dp: Signed | None = None


class _SglangEvents(Struct):
    block_size: Signed | None = None


class _ServerInfo(Struct):
    """The entries of /server_info that kvroute reads, of some 550."""

    version: Name | None = None
    served_model_name: Name | None = None
    model_path: Name | None = None
    page_size: Signed | None = None
    dp_size: Signed | None = None
    max_total_num_tokens: Signed | None = None
    max_running_requests: Signed | None = None
    context_length: Signed | None = None
    chunked_prefill_size: Signed | None = None
    max_prefill_tokens: Signed | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    kv_events: _SglangEvents | None = None
    internal_states: list[_SglangState] = []
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: Annotated[int, Meta(ge=0, le=65535)] | None = None


class _ModelInfo(Struct):
    served_model_name: Name | None = None
    model_path: Name | None = None


def sglang_identity(
    server_info: bytes | str,
    models: bytes | str | None = None,
    model_info: bytes | str | None = None,
) -> EngineIdentity:
    """Identity from /server_info, and, if available, /v1/models and /model_info.

    The block size is that of the events if the engine reports it: with context parallelism a block
    spans several pages. Raises LoadUnreadable.
    """
    info = read_json(server_info, _SERVER_INFO, "/server_info")
    troubles: list[str] = []
    more = optional_json(model_info, _MODEL_INFO, "/model_info", troubles)
    model = info.served_model_name or (more and more.served_model_name)
    model = model or info.model_path or (more and more.model_path) or None
    aliases: tuple[str, ...] = ()
    lora_names: tuple[str, ...] = ()
    max_model_len = info.context_length
    if models is not None:
        try:
            name, aliases, lora_names, listed_len = read_models(models)
            model = model or name
            max_model_len = listed_len or max_model_len
        except LoadUnreadable as error:
            troubles.append(error.reason)
    ranks = info.dp_size if info.dp_size and info.dp_size > 0 else None
    slots = next(
        (state.effective_max_running_requests_per_dp for state in info.internal_states), None
    )
    if not slots and info.max_running_requests:
        slots = info.max_running_requests // (ranks or 1)
    block_size = (info.kv_events and info.kv_events.block_size) or info.page_size
    if block_size is not None and not 1 <= block_size <= BLOCK_SIZE_MAX:
        raise LoadUnreadable(
            f"/server_info has a page size of {block_size} tokens, outside 1 to {BLOCK_SIZE_MAX}"
        )
    total_tokens = natural(info.max_total_num_tokens)
    half = info.disaggregation_mode in ("prefill", "decode")  # "null": it serves whole requests
    return EngineIdentity(
        model=model,
        aliases=aliases,
        lora_names=lora_names,
        max_model_len=natural(max_model_len),
        version=info.version,
        block_size=block_size,
        total_blocks=total_tokens // block_size if total_tokens and block_size else None,
        total_slots=natural(slots),
        # Without chunks (-1), max_prefill_tokens bounds the prompts of a step.
        token_budget=natural(info.chunked_prefill_size) or natural(info.max_prefill_tokens),
        dp_ranks=ranks,
        priority_scheduling=info.enable_priority_scheduling,
        low_priority_first=info.schedule_low_priority_values_first,
        role=info.disaggregation_mode if half else None,
        bootstrap_port=info.disaggregation_bootstrap_port if half else None,
        troubles=tuple(troubles),
    )


_SGLANG_LOADS = msgspec.json.Decoder(_SglangLoads)
_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)
_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_LOAD_STAT = msgspec.msgpack.Decoder(_LoadStat)
