"""Requests at SGLang that wait for KV of another engine. Pure.

The KV is fetched (prefill/decode disaggregation, copies of prefixes) as soon as there are pages for
the whole prompt, in order of arrival. RESERVED_DECODE_TOKENS must be left for each request that
decodes or is being fetched. With its whole KV here, the request joins the decode batch without a
prefill. Only the tokens that the cache lacks are fetched. A request that is retracted later
computes all its KV here; SGLang would bring the KV back from host memory.

Source: sgl-project/sglang python/sglang/srt/disaggregation/decode.py, `pop_preallocated` and
`get_new_prebuilt_batch`, release 0.5.7.
"""

from collections import deque

from simulator.engines.radix_cache import RadixCache
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.pages import SequencePages

RESERVED_DECODE_TOKENS = 512


class Arrivals:
    """The requests that wait for KV of another engine; none of them is in the waiting queue or a
    batch."""

    def __init__(self, config: SglangConfig, cache: RadixCache, pages: SequencePages) -> None:
        self._config = config
        self._cache = cache
        self._pages = pages
        self._unplaced: deque[SglangSequence] = deque()
        """Requests whose KV another engine has, and that have no pages for it yet."""
        self._fetching: dict[SglangSequence, float] = {}
        """Requests with pages -> when their KV will have arrived."""

    def __len__(self) -> int:
        return len(self._unplaced) + len(self._fetching)

    @property
    def fetching(self) -> bool:
        """Whether any of the requests holds pages."""
        return bool(self._fetching)

    @property
    def next_ready_s(self) -> float | None:
        """Time at which the next request can join the batch, in seconds; before now while the batch
        has no place for it. None: no request is being fetched."""
        return min(self._fetching.values(), default=None)

    def ready_after(self, now_s: float) -> float | None:
        """Time, after now_s, at which the next transfer ends; None: no transfer is going on."""
        return min(
            (ready_s for ready_s in self._fetching.values() if ready_s > now_s), default=None
        )

    def sequences(self) -> list[SglangSequence]:
        return [*self._fetching, *self._unplaced]

    def add(self, sequence: SglangSequence) -> bool:
        """Takes a request whose KV another engine has; False for any other request."""
        if sequence.submission.remote_tokens:
            self._unplaced.append(sequence)
            return True
        return False

    def drop(self, sequence: SglangSequence) -> bool:
        """Forgets a request; the caller releases its pages. False when it isn't here."""
        if sequence in self._unplaced:
            self._unplaced.remove(sequence)
            return True
        return self._fetching.pop(sequence, None) is not None

    def begin_fetches(self, running: int, now_s: float) -> list[tuple[SglangSequence, int]]:
        """Takes pages for as many requests as possible; returns the requests whose transfer begins
        now, each with the number of tokens to transfer. running: requests that decode."""
        size = self._config.block_size
        begun: list[tuple[SglangSequence, int]] = []
        while self._unplaced:
            sequence = self._unplaced[0]
            node, cached = self._pages.match(sequence)
            self._cache.lock(node)
            needed = -(-sequence.known_tokens // size) - cached
            others = running + len(self._fetching)
            reserved = (others + 1) * RESERVED_DECODE_TOKENS if others else 0
            if (self._cache.available - needed) * size < reserved or self._cache.available < needed:
                self._cache.unlock(node)
                break
            self._unplaced.popleft()
            self._pages.hold(sequence, node, cached)
            self._cache.make_room(needed)
            self._pages.take([sequence], [sequence.known_tokens])
            remote = min(sequence.submission.remote_tokens, sequence.known_tokens)
            tokens = max(remote - cached * size, 0)
            distance = sequence.submission.remote_distance
            self._fetching[sequence] = now_s + self._config.cost.transfer_s(tokens, distance)
            begun.append((sequence, tokens))
        return begun

    def arrived(self, places: int, now_s: float) -> list[SglangSequence]:
        """Requests that may join a batch now, at most `places`, in the order of their fetches."""
        ready = [sequence for sequence, ready_s in self._fetching.items() if ready_s <= now_s][
            :places
        ]
        for sequence in ready:
            del self._fetching[sequence]
            have = max(sequence.submission.remote_tokens, sequence.computed_tokens)
            sequence.computed_tokens = min(have, sequence.known_tokens - 1)
        return ready
