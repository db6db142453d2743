"""Reads TensorRT-LLM's documents about its load and identity. Pure.

Source: tensorrt_llm/metrics/collector.py and tensorrt_llm/serve/openai_server.py of
NVIDIA/TensorRT-LLM, main branch, read 2026-11-28.
"""

from events.engines.events import LoadSample
from events.engines.pages.load import (
    BLOCK_SIZE_MAX,
    VERSION,
    EngineIdentity,
    LoadUnreadable,
    bounded,
    natural,
    optional_json,
    read_models,
)
from events.engines.pages.metrics_page import Page, share, whole

_RUNNING = "trtllm_num_requests_running"
_WAITING = "trtllm_num_requests_waiting"
_SLOTS = "trtllm_max_num_active_requests"
_TOTAL = "trtllm_kv_cache_max_blocks"
_USED = "trtllm_kv_cache_used_blocks"
_BLOCK_SIZE = "trtllm_kv_cache_tokens_per_block"
_HIT_RATE = "trtllm_kv_cache_hit_rate"
_NAMES = (
    *("process_start_time_seconds", _RUNNING, _WAITING, _SLOTS, _TOTAL, _USED),
    *(_BLOCK_SIZE, _HIT_RATE),
)
_RANK = "dp_rank"


def trtllm_loads(text: str) -> dict[int, LoadSample]:
    """Load from /prometheus/metrics, which an engine with `return_perf_metrics` has. The page has
    no ranks: its numbers are those of rank 0. Further number, if on the page: cache_hit_rate.
    Raises LoadUnreadable."""
    page = Page(text, _NAMES)
    samples = {name: page.rank_sample(0, _RANK, name) for name in _NAMES}
    running, waiting = samples[_RUNNING], samples[_WAITING]
    if running is None or waiting is None:
        raise LoadUnreadable(f"the metrics page lacks {_RUNNING if running is None else _WAITING}")
    load = LoadSample(
        running=whole(running),
        waiting=whole(waiting),
        model=running.labels.get("model_name"),
        process_start_s=page.start_s(),
    )
    if slots := samples[_SLOTS]:
        load.total_slots = whole(slots) or None
    if used := samples[_USED]:
        load.used_blocks = bounded(_USED, used.value)
    if total := samples[_TOTAL]:
        load.total_blocks = whole(total) or None
    if size := samples[_BLOCK_SIZE]:
        load.block_size = whole(size, BLOCK_SIZE_MAX) or None
    if hit_rate := samples[_HIT_RATE]:
        load.numbers["cache_hit_rate"] = share(hit_rate)
    return {0: load}


def trtllm_identity(models: bytes | str, version: bytes | str | None = None) -> EngineIdentity:
    """Identity from /v1/models, and, if available and readable, /version. Raises LoadUnreadable."""
    model, aliases, lora_names, max_model_len = read_models(models)
    troubles: list[str] = []
    release = optional_json(version, VERSION, "/version", troubles)
    return EngineIdentity(
        model=model,
        aliases=aliases,
        lora_names=lora_names,
        max_model_len=natural(max_model_len),
        version=None if release is None else release.version,
        troubles=tuple(troubles),
    )
