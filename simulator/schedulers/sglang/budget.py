"""Which requests SGLang admits to a prefill batch, by tokens of prompts and of answers. Pure.

A request is admitted while its prompt and its longest answer are less than

    total_left = available - admitted prompts - answers of admitted requests
               - new_token_ratio * (tokens that running requests may still generate)

where `available` are the tokens of free and evictable pages: locking a cached prefix takes its
pages out of them. An answer counts at most CLIP_MAX_NEW_TOKENS. The answer of a new request counts
whole, the rest of a running request's answer by the ratio. The ratio falls from step to step and
rises when requests had to be retracted. Two further limits concern the batch alone: `input_left`
(--max-prefill-tokens) ends it after the request that exceeds it, and `chunk_left`
(--chunked-prefill-size) cuts a prompt, so that at most one request is partly computed.

Source: sgl-project/sglang python/sglang/srt/managers/schedule_policy.py, class PrefillAdder,
release 0.5.7.
"""

from collections.abc import Sequence
from enum import Enum, auto
from operator import itemgetter

from simulator.engines.radix_cache import RadixCache
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.pages import SequencePages

CLIP_MAX_NEW_TOKENS = 4096
IGNORE_EOS_RESERVE_TOKENS = 1


class Verdict(Enum):
    """Whether the batch may grow further."""

    GO_ON = auto()
    NO_MEMORY = auto()
    BATCH_FULL = auto()


class PrefillBudget:
    """The tokens left for one prefill batch, and the requests admitted to it so far."""

    def __init__(
        self,
        config: SglangConfig,
        cache: RadixCache,
        pages: SequencePages,
        running: Sequence[SglangSequence],
        new_token_ratio: float,
        mixed_tokens: int = 0,
    ) -> None:
        """mixed_tokens: tokens of running requests that the batch also decodes."""
        self._config = config
        self._cache = cache
        self._pages = pages
        self._ratio = new_token_ratio
        self._total_set_aside = mixed_tokens + sum(map(self.still_to_bring, running))
        self._current_set_aside = mixed_tokens
        self._input_left = config.prefill_tokens_max - mixed_tokens
        self._chunk_left = config.step_tokens_max - mixed_tokens if config.chunked_prefill else None
        self._exact = config.ignore_eos and not config.radix_cache
        self._running = list(running)
        self._ends: list[tuple[int, int]] = []
        """(tokens still to generate, tokens held) of running and examined requests, in the order
        in which they end."""
        self.admitted: list[SglangSequence] = []
        self.chunked: SglangSequence | None = None
        """The last request of the batch, if only a part of its prompt is computed."""

    @property
    def total_left(self) -> float:
        """Available tokens less those set aside: the batch's prompts and answers, and answers of
        running requests."""
        return self._available_tokens - self._total_set_aside

    @property
    def current_left(self) -> int:
        """Available tokens less those of the batch's prompts."""
        return self._available_tokens - self._current_set_aside

    def still_to_bring(self, sequence: SglangSequence) -> float:
        """Tokens set aside for the rest of a running request's answer: new_token_ratio times the
        rest; with ignore_eos (answers of fixed length) the whole rest, as in 0.5.23."""
        ratio = 1.0 if self._config.ignore_eos else self._ratio
        left = sequence.max_tokens - sequence.output_tokens
        return min(left, CLIP_MAX_NEW_TOKENS) * ratio

    def add_next_chunk(self, sequence: SglangSequence) -> bool:
        """Adds the partly computed request, which goes first, whatever is set aside for others.

        False when there is no page for it, since requests that decode beside it took the pages.
        (SGLang fails then.)
        """
        if self._chunk_left is None:
            raise RuntimeError("a prompt is partly computed, but chunked prefill is off")
        left = min(self._chunk_left, int(self.total_left))
        if left <= 0:
            left = self._chunk_left
        held = (sequence.shared_pages + sequence.private_pages) * self._config.block_size
        left = min(left, self._available_tokens + held - sequence.computed_tokens)
        if left <= 0:
            return False
        wanted = sequence.known_tokens - sequence.computed_tokens
        self._admit(sequence, wanted, left if wanted > left else None)
        return True

    def add(self, sequence: SglangSequence) -> Verdict:
        """Looks a waiting request up in the cache; if it fits, locks its prefix and admits it.
        Returns whether the batch may grow further."""
        config, cache = self._config, self._cache
        node, pages = self._pages.match(sequence)  # counts as a use, even without admission
        limit = config.prefill_requests_max
        if limit is not None and len(self.admitted) >= limit:
            return Verdict.BATCH_FULL
        if self._exact:
            return self._add_exact(sequence)
        extend = sequence.known_tokens - pages * config.block_size
        to_bring = min(max(sequence.max_tokens - sequence.output_tokens, 0), CLIP_MAX_NEW_TOKENS)
        if extend + to_bring >= self.total_left:
            return Verdict.NO_MEMORY
        paged = self._ceil(extend)
        if paged >= self._input_left and self.admitted:
            return Verdict.BATCH_FULL
        chunk = None
        if self._chunk_left is not None and paged > self._chunk_left:
            chunk = self._chunk_left // config.block_size * config.block_size
        cache.lock(node)
        if extend + to_bring >= self.total_left or (chunk is not None and chunk <= 0):
            no_memory = extend + to_bring >= self.total_left
            cache.unlock(node)
            return Verdict.NO_MEMORY if no_memory else Verdict.BATCH_FULL
        self._pages.hold(sequence, node, pages)
        self._admit(sequence, extend, chunk)
        return self._verdict()

    def victims(
        self, sequence: SglangSequence, running: Sequence[SglangSequence]
    ) -> list[SglangSequence]:
        """Running requests to stop so that a waiting request fits; empty if stopping isn't enough.

        The least important go first, of equals the youngest, and only requests whose priority is
        worse by more than the threshold.
        """
        config, sign = self._config, self._config.priority_sign
        missing = (
            sequence.known_tokens
            - self._pages.cached_pages(sequence) * config.block_size
            + min(sequence.max_tokens, CLIP_MAX_NEW_TOKENS)
            - self.total_left
        )
        victims: list[SglangSequence] = []
        for other in sorted(running, key=lambda other: (-other.priority * sign, -other.queued)):
            if (other.priority - sequence.priority) * sign <= config.preemption_threshold:
                break
            victims.append(other)
            missing -= self.still_to_bring(other)
            if missing <= 0:
                return victims
        return []

    def forgo(self, sequence: SglangSequence) -> None:
        """Frees the tokens set aside for a running request that is stopped."""
        self._running.remove(sequence)
        self._total_set_aside -= self.still_to_bring(sequence)

    @property
    def _available_tokens(self) -> int:
        return self._cache.available * self._config.block_size

    def _ceil(self, tokens: int) -> int:
        size = self._config.block_size
        return -(-tokens // size) * size

    def _admit(self, sequence: SglangSequence, extend: int, chunk: int | None) -> None:
        sequence.extend_tokens = extend if chunk is None else chunk
        self.admitted.append(sequence)
        if chunk is None:
            self._spend(extend, min(sequence.max_tokens, CLIP_MAX_NEW_TOKENS))
        else:
            self.chunked = sequence
            self._spend(chunk, 0)

    def _spend(self, extend: int, to_bring: int) -> None:
        extend = self._ceil(extend)
        self._total_set_aside += extend + to_bring
        self._current_set_aside += extend
        self._input_left -= extend
        if self._chunk_left is not None:
            self._chunk_left -= extend

    def _verdict(self) -> Verdict:
        if self.total_left <= 0 or self.current_left <= 0:
            return Verdict.NO_MEMORY
        if self._input_left <= 0 or (self._chunk_left is not None and self._chunk_left <= 0):
            return Verdict.BATCH_FULL
        return Verdict.GO_ON

    def _add_exact(self, sequence: SglangSequence) -> Verdict:
        """Plans memory to each request's end, for runs without a cache and answers of known length.

        Each request that ends frees its tokens. At each end, each request that still runs must have
        IGNORE_EOS_RESERVE_TOKENS left.
        """
        held_back = min(self.current_left, self.total_left)
        extend = sequence.known_tokens
        if self._ceil(extend) > held_back:
            return Verdict.NO_MEMORY
        own = _end(sequence)
        if not self._ends:
            others = map(_end, (*self._running, *self.admitted))
            self._ends = sorted([own, *others], key=itemgetter(0))
        else:
            last = len(self._ends) - 1  # a request that ends later than all takes this place
            places = (i for i, (to_bring, _) in enumerate(self._ends) if own[0] <= to_bring)
            self._ends.insert(next(places, last), own)
        left = self.current_left - self._ceil(extend)
        for i, (to_bring, held) in enumerate(self._ends):
            still_running = len(self._ends) - i
            if left - to_bring * still_running <= IGNORE_EOS_RESERVE_TOKENS * still_running:
                return Verdict.NO_MEMORY
            left += held
        chunk = None
        if self._chunk_left is not None and extend > self._chunk_left:
            chunk = self._chunk_left
            if chunk <= 0:
                return Verdict.BATCH_FULL
        self._pages.hold(sequence, self._cache.root, 0)
        self._admit(sequence, extend, chunk)
        return self._verdict()


def _end(sequence: SglangSequence) -> tuple[int, int]:
    """(tokens still to generate, tokens held) of a request."""
    return sequence.max_tokens - sequence.output_tokens, sequence.known_tokens
