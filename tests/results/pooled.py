"""A yardstick: the mean time to first token of one cache for all, and no queues."""

import numpy as np

from simulator.engines.cost_model import PrefillChunk
from simulator.engines.scheduler import SchedulerConfig
from simulator.traffic.reuse import reusable_blocks
from simulator.traffic.trace import Trace
from simulator.world.options import RunOptions


def pooled_ttft_ms(trace: Trace, fleet: RunOptions) -> float:
    """Mean prefill time if nobody waited and one LRU cache of the whole fleet's size served all, in
    the order of the trace. No bound (see simulator.traffic.reuse)."""
    config = fleet.scheduler
    cached = config.block_size * reusable_blocks(
        trace.requests, config.block_size, fleet.cache_blocks
    )
    times_s = [
        _prefill_s(config, tokens, request.prompt_tokens)
        for tokens, request in zip(cached.tolist(), trace.requests, strict=True)
    ]
    return 1e3 * float(np.mean(times_s))


def _prefill_s(config: SchedulerConfig, cached: int, prompt_tokens: int) -> float:
    """Alone on an engine, chunk by chunk."""
    time_s = 0.0
    while cached < prompt_tokens:
        tokens = min(config.step_tokens_max, prompt_tokens - cached)
        time_s += config.cost.step_s([PrefillChunk(tokens, cached)])
        cached += tokens
    return time_s
