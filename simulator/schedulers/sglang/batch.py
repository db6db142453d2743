"""SGLang's decode batch: all requests whose prompt is computed; each gets a token per step. Pure.

Before a step there must be a page for each request whose last page is full. If eviction doesn't
free enough, requests are *retracted*: they give up all pages, and compute them again later.

Source: sgl-project/sglang python/sglang/srt/managers/schedule_batch.py, class ScheduleBatch, and
mem_cache/common.py, release 0.5.7.
"""

from bisect import bisect_right

from simulator.engines.radix_cache import RadixCache
from simulator.engines.scheduler import Output
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence
from simulator.schedulers.sglang.pages import SequencePages
from simulator.schedulers.sglang.ratio import RETRACT_DECODE_STEPS, NewTokenRatio


class DecodeBatch:
    """The requests that decode, and the steps that are going on."""

    def __init__(
        self, config: SglangConfig, cache: RadixCache, pages: SequencePages, ratio: NewTokenRatio
    ) -> None:
        self._config = config
        self._cache = cache
        self._pages = pages
        self._ratio = ratio
        self.members: list[SglangSequence] = []
        self.decoding: list[SglangSequence] = []
        """Members whose next token the present step computes."""

    def join(self, sequences: list[SglangSequence]) -> None:
        """Adds requests whose prompts are computed. The order decides which of equal requests is
        retracted: after a mixed batch, the new requests come first."""
        if self.decoding:
            self.members = sequences + self.members
        else:
            self.members += sequences

    def make_room(self, *, may_empty: bool) -> list[SglangSequence]:
        """Makes room for the next step; returns the requests that were retracted for it.

        The request with the fewest output tokens is retracted first, of equals the longest prompt.
        may_empty: all may be retracted, since requests outside the batch hold pages. Raises
        RuntimeError if the only request left lacks a page.
        """
        if self._room_for(self.members):
            self._ratio.decay(1)
            return []
        kept = sorted(
            self.members,
            key=lambda member: (member.output_tokens, -member.prompt_tokens),
            reverse=True,
        )
        kept_min = 0 if may_empty else 1
        retracted: list[SglangSequence] = []
        while len(kept) > kept_min and not (retracted and self._room_for(kept)):
            retracted.append(kept.pop())
            self._stop(retracted[-1], len(kept))
        if not self._room_for(kept):
            raise RuntimeError(f"no page for the only request left: {self._cache!r}")
        self.members = kept
        self._ratio.set_after_retraction(kept)
        return retracted

    def preempt(self, victims: list[SglangSequence]) -> None:
        """Takes the pages of the `victims` and removes them from the batch, for a more important
        request."""
        left = len(self.members)
        for member in self.members:
            if member in victims:
                left -= 1
                self._stop(member, left)
        self.members = [member for member in self.members if member not in victims]

    def begin(self) -> None:
        """Lets all members decode in the next steps; `take_pages` takes the pages for these."""
        self.decoding = list(self.members)

    def begin_beside_prefill(self) -> None:
        """Lets all members decode one step beside a prefill (mixed batch) and takes their pages;
        without room they wait, where SGLang would fail."""
        if self._room_for(self.members):
            self.begin()
            self.take_pages(0, 1)

    def end(self) -> None:
        """Ends the steps: no member decodes until the next `begin`."""
        self.decoding = []

    def steps_max(self, limit: int) -> int:
        """How many consecutive steps have the same members and enough pages, at least 1."""
        steps = limit
        for member in self.decoding:
            # The first token after a transfer is reported as soon as it is out.
            steps = min(steps, member.remaining_tokens if member.first_token_s is not None else 1)
        if steps > 1 and not self._steps_fit(steps):
            steps = bisect_right(range(1, steps), False, key=lambda n: not self._steps_fit(n))
        return max(steps, 1)

    def take_pages(self, begun: int, steps: int) -> None:
        """Takes the pages of `steps` more steps, with the effects of single steps. begun: number of
        steps before these whose pages are taken and whose tokens are not out.

        Each step first makes room for a page of every request, needed or not. So the joined steps
        evict for the pages of all steps but the last, and for a page of every request.
        """
        size, ahead = self._config.block_size, begun + steps
        decoding = before = last = 0
        for member in self.decoding:
            if member.node is None:
                continue  # aborted
            decoding += 1
            held = member.shared_pages + member.private_pages
            tokens = member.computed_tokens + ahead
            if tokens <= held * size:
                continue
            held_before = max(held, -(-(tokens - 1) // size))
            held_then = -(-tokens // size)
            before += held_before - held
            last += held_then - held_before
            member.private_pages += held_then - held
        self._cache.make_room(before + decoding)
        self._cache.take(before + last)

    def apply(self, steps: int) -> list[Output]:
        """Applies `steps` more steps; returns their new tokens. A finished request leaves, and its
        computed pages join the tree."""
        outputs: list[Output] = []
        for member in self.decoding:
            if member.node is None:
                continue  # aborted
            first = member.known_tokens
            member.computed_tokens += steps
            member.known_tokens = last = first + steps
            finished = last == member.total_tokens
            outputs.append(Output(member, first, last, finished))
            if finished:
                self.members.remove(member)
                self._pages.store(member)
                self._pages.release(member)
        return outputs

    def _room_for(self, sequences: list[SglangSequence]) -> bool:
        """Evicts pages if necessary; whether each request that needs a page for its next token has
        one."""
        size = self._config.block_size
        return self._cache.make_room(sum(not member.computed_tokens % size for member in sequences))

    def _steps_fit(self, steps: int) -> bool:
        size = self._config.block_size
        return self._cache.available >= sum(
            -(-(member.computed_tokens + steps) // size)
            - member.shared_pages
            - member.private_pages
            for member in self.decoding
        )

    def _stop(self, sequence: SglangSequence, others: int) -> None:
        """Takes all pages from a member, and makes room for the `others`, the members that stay."""
        self._pages.release(sequence)
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self._cache.make_room(-(-others * RETRACT_DECODE_STEPS // self._config.block_size))
