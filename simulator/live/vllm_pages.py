"""Pages in which vLLM 0.32 describes itself over HTTP. Pure."""

from typing import Any

from simulator.engines.scheduler import Load, SchedulerConfig
from simulator.live.engine import Engine
from simulator.live.exposition import Labels, family, histogram, metric
from simulator.live.publisher import RING_BATCHES, Publisher

RELEASE = "0.32.0"
"""The release of vLLM whose pages these are."""


def _version(_engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    return {"version": RELEASE}


def _metrics(engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    """The engine's metrics in Prometheus' text format; the number of blocks and their size are
    labels of an info gauge."""
    load = engine.load()
    own = {"engine": "0", "model_name": engine.config.model}
    return "".join(
        [
            metric("process_start_time_seconds", "gauge", {}, engine.started_unix_s),
            *_requests(load, own),
            *_cache(load, engine.config.scheduler, own),
            *_totals(load, own),
            *(
                histogram(name, own, observed)
                for name, observed in engine.latencies.histograms.items()
            ),
        ]
    )


def _event_sources(_engine: Engine, publisher: Publisher | None, _bootstrap: int | None) -> Any:
    if publisher is None:
        return {}
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "buffer_steps": RING_BATCHES,
        "topic": publisher.topic,
    }
    return {"0": source}


def _requests(load: Load, own: Labels) -> list[str]:
    # Counted by the last step; requests may have left since. Reasons add up to all waiting.
    deferred = min(load.deferred, load.waiting)
    return [
        metric("vllm:num_requests_running", "gauge", own, load.running),
        metric("vllm:num_requests_waiting", "gauge", own, load.waiting),
        family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            [
                ({**own, "reason": "capacity"}, load.waiting - deferred),
                ({**own, "reason": "deferred"}, deferred),
            ],
        ),
    ]


def _cache(load: Load, scheduler: SchedulerConfig, own: Labels) -> list[str]:
    info = {
        "block_size": str(scheduler.block_size),
        "enable_prefix_caching": "True",
        "engine": "0",
        # vLLM also counts its null block.
        "num_gpu_blocks": str(scheduler.block_count + 1),
    }
    counters = {
        "vllm:prefix_cache_queries_total": load.prefix_queried_tokens,
        "vllm:prefix_cache_hits_total": load.prefix_hit_tokens,
        "vllm:external_prefix_cache_queries_total": load.external_queried_tokens,
        "vllm:external_prefix_cache_hits_total": load.external_hit_tokens,
    }
    return [
        metric("vllm:kv_cache_usage_perc", "gauge", own, load.usage),
        metric("vllm:cache_config_info", "gauge", info, 1),
        *(metric(name, "counter", own, value) for name, value in counters.items()),
    ]


def _totals(load: Load, own: Labels) -> list[str]:
    counters = {
        "vllm:num_preemptions_total": load.preemptions,
        "vllm:prompt_tokens_total": load.prompt_tokens,
        "vllm:generation_tokens_total": load.generated_tokens,
        "vllm:spec_decode_num_draft_tokens_total": load.drafted_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": load.accepted_tokens,
    }
    return [
        *(metric(name, "counter", own, value) for name, value in counters.items()),
        family(
            "vllm:request_success_total",
            "counter",
            [
                ({**own, "finished_reason": "length"}, load.finished),
                ({**own, "finished_reason": "abort"}, load.aborted),
            ],
        ),
    ]


PAGES = {"/version": _version, "/metrics": _metrics, "/kv_event_sources": _event_sources}
