"""Reads vLLM's documents about its load and identity. Pure."""

from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from events.engines.events import LoadSample
from events.engines.pages.load import (
    BLOCK_SIZE_MAX,
    COUNT_MAX,
    COUNTER_MAX,
    VERSION,
    EngineIdentity,
    LoadUnreadable,
    Name,
    bounded,
    count,
    natural,
    optional_json,
    positive,
    read_json,
    read_models,
)
from events.engines.pages.metrics_page import Page, rank_of, share, whole

_VLLM_NAMES = (
    "process_start_time_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # up to 0.11
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",  # up to 0.11
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",  # up to 0.11
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:cache_config_info",
    "vllm:engine_sleep_state",
)

_EMPTIED = ("weights_offloaded", "discard_all")
"""Sleep states of levels 1 and 2, which give the KV cache up; both are 0 at level 0."""


def vllm_loads(text: str) -> dict[int, LoadSample]:
    """Load by rank (label `engine`; absent means 0) from vLLM's /metrics, 0.9 and later.

        total_blocks = the rank's blocks - 1      vLLM reserves its null block
        used_blocks  = usage * total_blocks

    The rank's blocks are kv_cache_size_tokens / block_size. Older releases have num_gpu_blocks
    alone, the sum over the engines behind the page, which is divided by their number. total_slots
    is not on the page; see vllm_identity. Further numbers, if on the page: prefix_hit_tokens,
    prefix_query_tokens, first_tokens and first_token_seconds (since its start). Raises
    LoadUnreadable.
    """
    page = Page(text, _VLLM_NAMES)
    start_s = page.start_s()
    capacities = _vllm_capacities(page)
    loads: dict[int, LoadSample] = {}
    for rank, running in page.by_rank("vllm:num_requests_running", "engine").items():
        load = LoadSample(
            running=whole(running), model=running.labels.get("model_name"), process_start_s=start_s
        )
        load.block_size, load.total_blocks = capacities.get(rank, (None, None))
        loads[rank] = load
    if not loads:
        raise LoadUnreadable("the metrics page lacks vllm:num_requests_running")
    for rank, load in loads.items():
        waiting = page.rank_sample(rank, "engine", "vllm:num_requests_waiting")
        if waiting is None:
            raise LoadUnreadable(f"rank {rank} has no vllm:num_requests_waiting")
        load.waiting = whole(waiting)
        usage = page.rank_sample(
            rank, "engine", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
        )
        if usage is not None and load.total_blocks is not None:
            load.used_blocks = share(usage) * load.total_blocks
        if preemptions := page.rank_sample(rank, "engine", "vllm:num_preemptions_total"):
            load.preemptions = whole(preemptions)
        for name, names in (
            (
                "prefix_hit_tokens",
                ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            ),
            (
                "prefix_query_tokens",
                ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            ),
            ("first_tokens", ("vllm:time_to_first_token_seconds_count",)),
        ):
            if sample := page.rank_sample(rank, "engine", *names):
                load.numbers[name] = float(whole(sample, COUNTER_MAX))
        if sample := page.rank_sample(rank, "engine", "vllm:time_to_first_token_seconds_sum"):
            load.numbers["first_token_seconds"] = bounded(sample.name, sample.value, COUNTER_MAX)
    states: dict[int, dict[str | None, float]] = {}
    for sample in page.samples("vllm:engine_sleep_state"):
        states.setdefault(rank_of(sample, "engine"), {})[sample.labels.get("sleep_state")] = (
            sample.value
        )
    for rank, state in states.items():
        if rank in loads and state.get("awake") == 0:
            loads[rank].asleep = True
            loads[rank].emptied = any(state.get(name) != 0 for name in _EMPTIED)
    return loads


def _vllm_capacities(page: "Page") -> dict[int, tuple[int | None, int | None]]:
    """Rank -> (block size, blocks that requests can hold)."""
    infos = page.by_rank("vllm:cache_config_info", "engine")
    capacities: dict[int, tuple[int | None, int | None]] = {}
    for rank, info in infos.items():
        labels = info.labels
        # With context parallelism, a block of the events spans several cache blocks; 0.32 has the
        # effective size.
        block_size = positive(labels.get("effective_attention_block_size")) or positive(
            labels.get("block_size")
        )
        tokens = positive(labels.get("kv_cache_size_tokens"))
        blocks = positive(labels.get("num_gpu_blocks"))
        if tokens is not None and block_size is not None:
            blocks = tokens // block_size
        elif blocks is not None:
            blocks //= len(infos)
        if max(blocks or 0, block_size or 0) > COUNT_MAX or (block_size or 0) > BLOCK_SIZE_MAX:
            raise LoadUnreadable(
                f"rank {rank} has {blocks} blocks of {block_size} tokens, more than {COUNT_MAX} of"
                f" {BLOCK_SIZE_MAX}"
            )
        capacities[rank] = (block_size, None if blocks is None else max(blocks - 1, 0))
    return capacities


def vllm_identity(
    models: bytes | str,
    version: bytes | str | None = None,
    event_sources: bytes | str | None = None,
    server_info: bytes | str | None = None,
) -> EngineIdentity:
    """Identity from /v1/models, and, if available and readable, /version, /kv_event_sources (0.31
    and later), and /server_info?config_format=json, which only the development mode has.

    Raises LoadUnreadable.
    """
    model, aliases, lora_names, max_model_len = read_models(models)
    troubles: list[str] = []
    sources = optional_json(event_sources, _EVENT_SOURCES, "/kv_event_sources", troubles)
    release = optional_json(version, VERSION, "/version", troubles)
    info = optional_json(server_info, _VLLM_SERVER_INFO, "/server_info", troubles)
    scheduler = _vllm_scheduler(info)
    return EngineIdentity(
        model=model,
        aliases=aliases,
        lora_names=lora_names,
        max_model_len=natural(max_model_len),
        total_slots=count(scheduler.get("max_num_seqs")),
        token_budget=count(scheduler.get("max_num_batched_tokens")),
        version=None if release is None else release.version,
        dp_ranks=len(sources or ()) or None,
        troubles=tuple(troubles),
    )


def _vllm_scheduler(info: "_VllmServerInfo | None") -> Mapping[str, object]:
    """The scheduler's configuration in /server_info; empty if the page has it as text.

    The page is for people and differs between releases: each used value is checked by itself, so
    that no other part of the page makes an engine unreadable.
    """
    config = None if info is None else info.vllm_config
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    return scheduler if isinstance(scheduler, dict) else {}


class _VllmServerInfo(Struct):
    vllm_config: object = None


class _MooncakeEngine(Struct):
    engine_id: Name


def mooncake_engine_ids(document: bytes | str) -> dict[int, str]:
    """Rank -> engine_id, from /query of the bootstrap server of vLLM's MooncakeConnector. The id
    changes with each start of the engine unless it is configured. Raises LoadUnreadable."""
    engines = read_json(document, _MOONCAKE_ENGINES, "/query")
    ids = {rank: engine.engine_id for rank, engine in engines.items()}
    if not "".join(ids.values()).isprintable():  # which no heartbeat takes
        raise LoadUnreadable("/query has an engine_id with control characters")
    return ids


_EVENT_SOURCES = msgspec.json.Decoder(dict[str, Raw])
_VLLM_SERVER_INFO = msgspec.json.Decoder(_VllmServerInfo)
_MOONCAKE_ENGINES = msgspec.json.Decoder(dict[int, _MooncakeEngine])
