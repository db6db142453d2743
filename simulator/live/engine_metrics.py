"""An engine's counters as Prometheus text in vLLM's names. Pure."""

from collections.abc import Sequence

from simulator.engines.scheduler import Load, SchedulerConfig
from simulator.live.engine import Engine
from simulator.live.latencies import Histogram

_Labels = dict[str, str]


def metrics_text(engine: Engine) -> str:
    """Prometheus text in vLLM's names; total_blocks and block_size are labels of an info gauge."""
    load = engine.load()
    own = {"engine": "0", "model_name": engine.config.model}
    return "".join(
        [
            _metric("process_start_time_seconds", "gauge", {}, engine.started_unix_s),
            *_requests(load, own),
            *_cache(load, engine.config.scheduler, own),
            *_totals(load, own),
            *(
                _histogram(name, own, histogram)
                for name, histogram in engine.latencies.histograms.items()
            ),
        ]
    )


def _requests(load: Load, own: _Labels) -> list[str]:
    # Counted by the last step; requests may have left since. Reasons add up to all waiting.
    deferred = min(load.deferred, load.waiting)
    return [
        _metric("vllm:num_requests_running", "gauge", own, load.running),
        _metric("vllm:num_requests_waiting", "gauge", own, load.waiting),
        _family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            [
                (own | {"reason": "capacity"}, load.waiting - deferred),
                (own | {"reason": "deferred"}, deferred),
            ],
        ),
    ]


def _cache(load: Load, scheduler: SchedulerConfig, own: _Labels) -> list[str]:
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
        _metric("vllm:kv_cache_usage_perc", "gauge", own, load.usage),
        _metric("vllm:cache_config_info", "gauge", info, 1),
        *(_metric(name, "counter", own, value) for name, value in counters.items()),
    ]


def _totals(load: Load, own: _Labels) -> list[str]:
    counters = {
        "vllm:num_preemptions_total": load.preemptions,
        "vllm:prompt_tokens_total": load.prompt_tokens,
        "vllm:generation_tokens_total": load.generated_tokens,
        "vllm:spec_decode_num_draft_tokens_total": load.drafted_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": load.accepted_tokens,
    }
    return [
        *(_metric(name, "counter", own, value) for name, value in counters.items()),
        _family(
            "vllm:request_success_total",
            "counter",
            [
                (own | {"finished_reason": "length"}, load.finished),
                (own | {"finished_reason": "abort"}, load.aborted),
            ],
        ),
    ]


def _metric(name: str, kind: str, labels: _Labels, value: float) -> str:
    return _family(name, kind, [(labels, value)])


def _family(name: str, kind: str, samples: Sequence[tuple[_Labels, float]]) -> str:
    lines = "".join(_sample(name, labels, value) for labels, value in samples)
    return f"# TYPE {name} {kind}\n{lines}"


def _histogram(name: str, labels: _Labels, histogram: Histogram) -> str:
    samples = [
        _sample(f"{name}_bucket", labels | {"le": bound}, count)
        for bound, count in histogram.buckets()
    ]
    samples.append(_sample(f"{name}_count", labels, histogram.count))
    samples.append(_sample(f"{name}_sum", labels, histogram.sum_s))
    return f"# TYPE {name} histogram\n{''.join(samples)}"


def _sample(name: str, labels: _Labels, value: float) -> str:
    inside = ",".join(f'{label}="{_escape(text)}"' for label, text in sorted(labels.items()))
    return f"{name}{{{inside}}} {float(value)!r}\n" if inside else f"{name} {float(value)!r}\n"


def _escape(label_value: str) -> str:
    return label_value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
