"""Requests of SGLang's that wait for something else than their turn. Pure.

*Grammars* are compiled beside the queue; a request joins it when its own is ready.

*KV cache of another engine* (prefill/decode disaggregation, copies of prefixes) is fetched as soon
as there are pages for the whole prompt, first come first, and while RESERVED_DECODE_TOKENS are left
for each request that decodes or is on its way. When all has come, the request joins the decode
batch without a prefill. Only what the cache lacks is fetched. A request that is retracted later
computes everything here, where SGLang would bring it back from host memory.

Source: sgl-project/sglang python/sglang/srt/managers/scheduler.py, `move_ready_grammar_requests`,
and disaggregation/decode.py, `pop_preallocated` and `get_new_prebuilt_batch`, release 0.5.7.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from simulator.engines.radix_cache import RadixCache
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.pages import SequencePages

RESERVED_DECODE_TOKENS = 512


class Arrivals:
    """Whoever is here is in no queue and no batch."""

    def __init__(self, config: SglangConfig, cache: RadixCache, pages: SequencePages) -> None:
        self._config = config
        self._cache = cache
        self._pages = pages
        self._grammars: list[SglangSequence] = []
        self._unplaced: deque[SglangSequence] = deque()
        """Whose KV another engine has, and who have no pages for it."""
        self._fetching: dict[SglangSequence, float] = {}
        """Who have pages -> when their KV will have come."""

    def __len__(self) -> int:
        return len(self._grammars) + len(self._unplaced) + len(self._fetching)

    @property
    def fetching(self) -> bool:
        """Whether somebody holds pages here."""
        return bool(self._fetching)

    @property
    def next_ready_s(self) -> float | None:
        """When the next of them can join queue or batch; past, when the batch has no place."""
        return min(self._ready_times(), default=None)

    def ready_after(self, now_s: float) -> float | None:
        """The same, of those who aren't ready yet."""
        return min((one for one in self._ready_times() if one > now_s), default=None)

    def sequences(self) -> list[SglangSequence]:
        return [*self._fetching, *self._unplaced, *self._grammars]

    def add(self, sequence: SglangSequence, now_s: float) -> bool:
        """Takes a request that has to wait here; False when it needn't."""
        if sequence.submission.ready_s > now_s:
            self._grammars.append(sequence)
        elif sequence.submission.remote_tokens:
            self._unplaced.append(sequence)
        else:
            return False
        return True

    def drop(self, sequence: SglangSequence) -> bool:
        """Forgets a request; its pages are the caller's business. False when it isn't here."""
        for queue in (self._grammars, self._unplaced):
            if sequence in queue:
                queue.remove(sequence)
                return True
        return self._fetching.pop(sequence, None) is not None

    def grammars_ready(self, now_s: float) -> list[SglangSequence]:
        """Who may join the queue now, in the order in which they came."""
        ready = [one for one in self._grammars if one.submission.ready_s <= now_s]
        if ready:
            self._grammars = [one for one in self._grammars if one not in ready]
        return ready

    def begin_fetches(self, running: int, now_s: float) -> list[tuple[SglangSequence, int]]:
        """Finds pages for as many as possible; returns whose KV is on its way now, and how many
        tokens of it."""
        size = self._config.block_size
        begun: list[tuple[SglangSequence, int]] = []
        while self._unplaced:
            sequence = self._unplaced[0]
            node, found = self._pages.match(sequence)
            self._cache.lock(node)
            needed = -(-sequence.known_tokens // size) - found
            others = running + len(self._fetching)
            reserved = (others + 1) * RESERVED_DECODE_TOKENS if others else 0
            if (self._cache.available - needed) * size < reserved or self._cache.available < needed:
                self._cache.unlock(node)
                break
            self._unplaced.popleft()
            self._pages.hold(sequence, node, found)
            self._cache.make_room(needed)
            self._pages.take([sequence], [sequence.known_tokens])
            remote = min(sequence.submission.remote_tokens, sequence.known_tokens)
            tokens = max(remote - found * size, 0)
            distance = sequence.submission.remote_distance
            self._fetching[sequence] = now_s + self._config.cost.transfer_s(tokens, distance)
            begun.append((sequence, tokens))
        return begun

    def arrived(self, places: int, now_s: float) -> list[SglangSequence]:
        """Who may join a batch now, as many as it has places for, in the order of their fetches."""
        ready = [one for one, ready_s in self._fetching.items() if ready_s <= now_s][:places]
        for one in ready:
            del self._fetching[one]
            have = max(one.submission.remote_tokens, one.computed_tokens)
            one.computed_tokens = min(have, one.known_tokens - 1)
        return ready

    def _ready_times(self) -> Iterator[float]:
        grammars = (one.submission.ready_s for one in self._grammars)
        return chain(grammars, self._fetching.values())
