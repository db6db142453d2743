"""The order in which SGLang goes through its waiting queue. Pure.

    fcfs        order of arrival; with priority scheduling, by priority first
    lpm         longest cached prefix first; like fcfs while more than 128 wait
    dfs-weight  branch of the radix tree with most waiting requests first
    lof         most max_tokens first; with priority scheduling, by priority first
    random      shuffled again for every prefill batch

Sorting is stable, and the queue stays as it was sorted. A retracted request joins at the end.

Source: sgl-project/sglang python/sglang/srt/managers/schedule_policy.py, class SchedulePolicy,
release 0.5.7. Prefixes are compared in whole pages here, so two queued requests that share 32
tokens and no page count as different.
"""

from collections import defaultdict
from random import Random

from simulator.engines.radix_cache import RadixCache, RadixNode
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence

LPM_WAITING_MAX = 128
"""Waiting requests up to which prefixes are looked up: with more, that costs more than it saves."""
IN_BATCH_CHECK_TOKENS = 32
"""A request with at most so many cached tokens is compared with the requests before it."""
IN_BATCH_DEPRIORITIZE_TOKENS = 32
"""A request that shares at least so many tokens with an earlier request goes last, so that the
earlier request computes them."""


class WaitingOrder:
    """Sorts the waiting queue before each prefill batch."""

    def __init__(self, config: SglangConfig, cache: RadixCache) -> None:
        self._config = config
        self._cache = cache
        self._random = Random(config.seed)

    def sort(self, waiting: list[SglangSequence]) -> None:
        """Sorts the queue in place. lpm and dfs-weight look up every prefix, which counts as a
        use."""
        match self._config.policy:
            case "fcfs":
                if self._config.priority_scheduling:
                    sign = self._config.priority_sign
                    waiting.sort(key=lambda request: (request.priority * sign, request.queued))
            case "lpm" if not self._config.radix_cache or len(waiting) > LPM_WAITING_MAX:
                pass
            case "lpm":
                self._by_longest_prefix(waiting)
            case "dfs-weight":
                if self._config.radix_cache:
                    self._by_weight(waiting)
            case "lof":
                sign = self._config.priority_sign
                waiting.sort(key=lambda request: (request.priority * sign, -request.max_tokens))
            case "random":
                self._random.shuffle(waiting)

    def _match(self, sequence: SglangSequence) -> tuple[RadixNode, int]:
        pages = sequence.known_tokens // self._config.block_size
        return self._cache.match(sequence.content.hashes(pages), pages)

    def _by_longest_prefix(self, waiting: list[SglangSequence]) -> None:
        size = self._config.block_size
        compared = -(-IN_BATCH_DEPRIORITIZE_TOKENS // size)
        seen: set[int] = set()
        """The `compared`-th pages of the requests before: equal pages mean equal prefixes."""
        place: dict[SglangSequence, float] = {}
        for sequence in waiting:
            _, cached = self._match(sequence)
            place[sequence] = -cached
            known_pages = sequence.known_tokens // size
            if cached * size <= IN_BATCH_CHECK_TOKENS and known_pages >= compared:
                page = sequence.content.hashes(compared)[compared - 1]
                if page in seen:
                    place[sequence] = float("inf")
                seen.add(page)
        waiting.sort(key=place.__getitem__)

    def _by_weight(self, waiting: list[SglangSequence]) -> None:
        """Sorts by a walk of the tree: depth first, heaviest child first, a node's own requests
        last."""
        ending: dict[RadixNode, list[SglangSequence]] = defaultdict(list)
        weight: dict[RadixNode, int] = defaultdict(int)
        """node -> requests whose prefix ends in it or below; only nodes with requests"""
        # A match may split a node in which an earlier prefix ended; that prefix still ends in the
        # lower part.
        for sequence in waiting:
            node, _ = self._match(sequence)
            ending[node].append(sequence)
        for end, sequences in ending.items():
            above: RadixNode | None = end
            while above is not None:
                weight[above] += len(sequences)
                above = above.parent
        waiting.clear()
        stack: list[tuple[RadixNode, bool]] = [(self._cache.root, False)]
        while stack:
            node, below_done = stack.pop()
            if below_done:
                waiting += ending.get(node, ())
                continue
            stack.append((node, True))
            heavy = [child for child in node.children.values() if child in weight]
            heavy.sort(key=lambda child: -weight[child])
            stack += [(child, False) for child in reversed(heavy)]
