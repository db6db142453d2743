"""Pages in which SGLang 0.5.23 describes itself over HTTP: the fields that routers read. Pure.

Metrics have SGLang's names; histograms have the bounds of vLLM's histograms.
"""

from typing import Any

from simulator.engines.scheduler import Load
from simulator.live.engine import Engine
from simulator.live.exposition import histogram, metric
from simulator.live.publisher import Publisher
from simulator.schedulers.sglang.config import SglangConfig

RELEASE = "0.5.23"
"""The release of SGLang whose pages these are."""
WHOLE = "null"
"""The disaggregation mode of an engine that serves whole requests."""
_LATENCIES = (
    "sglang:time_to_first_token_seconds", "sglang:request_time_per_output_token_seconds",
    "sglang:e2e_request_latency_seconds", "sglang:queue_time_seconds",
)  # fmt: skip
"""Names of the histograms, in the order of simulator.live.latencies."""


def _server_info(engine: Engine, publisher: Publisher | None, bootstrap: int | None) -> Any:
    config = engine.config
    limits = SglangConfig.of(config.scheduler)
    events = None
    if publisher is not None:
        events = {"publisher": "zmq", "topic": publisher.topic, "block_size": limits.block_size}
    return {
        **_model_info(engine, publisher, bootstrap),
        "version": RELEASE,
        "status": "ready",
        "page_size": limits.block_size,
        "dp_size": 1,
        "context_length": limits.model_len,
        "max_running_requests": limits.max_num_seqs,
        "max_total_num_tokens": limits.block_count * limits.block_size,
        "chunked_prefill_size": limits.step_tokens_max if limits.chunked_prefill else -1,
        "max_prefill_tokens": limits.prefill_tokens_max,
        "schedule_policy": limits.policy,
        "enable_priority_scheduling": limits.priority_scheduling,
        "schedule_low_priority_values_first": limits.low_priority_values_first,
        "disable_radix_cache": not limits.radix_cache,
        "kv_events": events,
        "disaggregation_bootstrap_port": bootstrap,
        "internal_states": [{"effective_max_running_requests_per_dp": limits.max_num_seqs}],
    }


def _model_info(engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    model = engine.config.model
    return {
        "model_path": model,
        "served_model_name": model,
        "is_generation": True,
        "disaggregation_mode": engine.config.half or WHOLE,
    }


def _loads(engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    load, limits = engine.load(), engine.config.scheduler
    row = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_used_tokens": load.used_blocks * limits.block_size,
        "max_total_num_tokens": load.total_blocks * limits.block_size,
        "max_running_requests": limits.max_num_seqs,
        "token_usage": load.usage,
        "cache_hit_rate": _hit_rate(load),
        "disaggregation": {"mode": engine.config.half or WHOLE},
    }
    return {"version": RELEASE, "loads": [row]}


def _metrics(engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    load, size = engine.load(), engine.config.scheduler.block_size
    own = {
        "model_name": engine.config.model,
        "engine_type": engine.config.half or "unified",
        "priority": "",
        "tp_rank": "0",
        "pp_rank": "0",
        "moe_ep_rank": "0",
    }
    gauges = {
        "num_running_reqs": load.running,
        "num_queue_reqs": load.waiting,
        "num_used_tokens": load.used_blocks * size,
        "max_total_num_tokens": load.total_blocks * size,
        "page_size": size,
        "token_usage": load.usage,
        "cache_hit_rate": _hit_rate(load),
    }
    counters = {
        "prompt_tokens_total": load.prompt_tokens,
        "generation_tokens_total": load.generated_tokens,
        "num_retracted_requests_total": load.preemptions,
    }
    observed = engine.latencies.histograms.values()
    return "".join(
        [
            metric("process_start_time_seconds", "gauge", {}, engine.started_unix_s),
            *(metric(f"sglang:{name}", "gauge", own, value) for name, value in gauges.items()),
            *(metric(f"sglang:{name}", "counter", own, value) for name, value in counters.items()),
            *(histogram(name, own, each) for name, each in zip(_LATENCIES, observed, strict=True)),
        ]
    )


def _hit_rate(load: Load) -> float:
    return load.prefix_hit_tokens / max(load.prefix_queried_tokens, 1)


PAGES = {
    "/server_info": _server_info,
    "/get_server_info": _server_info,
    "/model_info": _model_info,
    "/get_model_info": _model_info,
    "/v1/loads": _loads,
    "/metrics": _metrics,
}
