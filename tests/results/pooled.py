"""A yardstick: the mean time to first token of one cache for all, and no queues."""

from collections import OrderedDict

import numpy as np

from simulator.engines.cost_model import PrefillChunk
from simulator.engines.scheduler import SchedulerConfig
from simulator.traffic.trace import ID_TOKENS, Trace
from simulator.world.options import RunOptions


def pooled_ttft_ms(trace: Trace, fleet: RunOptions) -> float:
    """Mean prefill time if nobody waited and one LRU cache of the whole fleet's size served all.

    Prompts in the order of the trace, in pieces of 512 tokens; answers take no room. Not a bound:
    LRU is not the best order of eviction, and N caches can happen to evict more wisely than one.
    """
    config = fleet.scheduler
    room = fleet.workers * config.block_count * config.block_size // ID_TOKENS
    cache: OrderedDict[int, None] = OrderedDict()
    times_s = []
    for request in trace.requests:
        pieces = request.hash_ids.tolist()
        found = 0
        while found < len(pieces) and pieces[found] in cache:
            found += 1
        usable_max = (request.prompt_tokens - 1) // config.block_size * config.block_size
        cached = min(found * ID_TOKENS, usable_max)
        times_s.append(_prefill_s(config, cached, request.prompt_tokens))
        for piece in reversed(pieces):  # tails are evicted before their beginnings
            cache[piece] = None
            cache.move_to_end(piece)
        while len(cache) > room:
            cache.popitem(last=False)
    return 1e3 * float(np.mean(times_s))


def _prefill_s(config: SchedulerConfig, cached: int, prompt_tokens: int) -> float:
    """Alone on an engine, chunk by chunk."""
    time_s = 0.0
    while cached < prompt_tokens:
        tokens = min(config.step_tokens_max, prompt_tokens - cached)
        time_s += config.cost.step_s([PrefillChunk(tokens, cached)])
        cached += tokens
    return time_s
