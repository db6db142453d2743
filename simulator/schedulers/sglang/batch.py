"""SGLang's decode batch: all requests whose prompt is computed, a token each a step. Pure.

Before a step there must be a page for everyone whose last one is full. If eviction doesn't bring
enough, requests are *retracted*: they give up all pages, and compute them again later.

A run of steps takes its pages when they are due: `take_pages` goes on to the step that begins,
`apply` to the step that ends.

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
    """Who decodes, and the steps that are going on."""

    def __init__(
        self, config: SglangConfig, cache: RadixCache, pages: SequencePages, ratio: NewTokenRatio
    ) -> None:
        self._config = config
        self._cache = cache
        self._pages = pages
        self._ratio = ratio
        self.members: list[SglangSequence] = []
        self.decoding: list[SglangSequence] = []
        """Whose next token the step that is going on computes."""
        self.begun = self.ended = 0
        """Steps of the run whose pages are taken, and those whose tokens are out."""

    def join(self, sequences: list[SglangSequence]) -> None:
        """Their prompts are computed. The order decides who of equals is retracted: those of a
        mixed batch come before whom they were computed beside."""
        if self.decoding:
            self.members = sequences + self.members
        else:
            self.members += sequences

    def make_room(self, *, may_empty: bool) -> list[SglangSequence]:
        """Sees to it that a step can begin; returns whom it retracted for that.

        Fewest tokens out go first, the longest prompt among those. may_empty: all may have to go,
        since others than the members hold pages.
        """
        if self._room_for(self.members):
            self._ratio.decay(1)
            return []
        kept = sorted(
            self.members, key=lambda one: (one.output_tokens, -one.prompt_tokens), reverse=True
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
        """Stops members for somebody more important."""
        left = len(self.members)
        for one in self.members:
            if one in victims:
                left -= 1
                self._stop(one, left)
        self.members = [one for one in self.members if one not in victims]

    def begin(self) -> None:
        """All members decode in the steps to come, of which none has begun yet."""
        self.decoding = list(self.members)
        self.begun = self.ended = 0

    def begin_beside_prefill(self) -> None:
        """The same in a mixed batch; without room they wait, where the engine would fail."""
        if self._room_for(self.members):
            self.begin()
            self.take_pages(1)

    def end(self) -> None:
        """The steps are over."""
        self.decoding = []

    def steps_max(self, limit: int) -> int:
        """How many steps on end have the same members and enough pages, at least one."""
        steps = limit
        for one in self.decoding:
            # a first token, of somebody whose prompt came from elsewhere, is told when it is out
            steps = min(steps, one.remaining_tokens if one.first_token_s is not None else 1)
        if steps > 1 and not self._steps_fit(steps):
            steps = bisect_right(range(1, steps), False, key=lambda n: not self._steps_fit(n))
        return max(steps, 1)

    def take_pages(self, target: int) -> None:
        """Takes the pages of the steps up to the `target`-th, as one by one would.

        Each step first makes room for a page of every request, whether it needs one or not. What
        that evicts in all is what the last step's room evicts on top of what those before took.
        """
        if target <= self.begun or not self.decoding:
            return
        size, ahead = self._config.block_size, target - self.ended
        decoding = before = last = 0
        for one in self.decoding:
            if one.node is None:
                continue  # aborted
            decoding += 1
            held = one.shared_pages + one.private_pages
            tokens = one.computed_tokens + ahead
            if tokens <= held * size:
                continue
            held_before = max(held, -(-(tokens - 1) // size))
            held_then = -(-tokens // size)
            before += held_before - held
            last += held_then - held_before
            one.private_pages += held_then - held
        self._cache.make_room(before + decoding)
        self._cache.take(before + last)
        if self.begun:
            self._ratio.decay(target - self.begun)
        self.begun = target

    def apply(self, ended: int) -> list[Output]:
        """Brings out the tokens of all steps up to the `ended`-th; who has finished leaves, with
        all that it computed put into the tree."""
        steps = ended - self.ended
        self.ended = ended
        outputs: list[Output] = []
        for one in self.decoding:
            if one.node is None:
                continue  # aborted
            first = one.known_tokens
            one.computed_tokens += steps
            one.known_tokens = last = first + steps
            finished = last == one.total_tokens
            outputs.append(Output(one, first, last, finished))
            if finished:
                self.members.remove(one)
                self._pages.store(one)
                self._pages.release(one)
        return outputs

    def _room_for(self, sequences: list[SglangSequence]) -> bool:
        """Whether there is a page for everyone who lacks one for the next token."""
        size = self._config.block_size
        return self._cache.make_room(sum(not one.computed_tokens % size for one in sequences))

    def _steps_fit(self, steps: int) -> bool:
        size = self._config.block_size
        return self._cache.available >= sum(
            -(-(one.computed_tokens + steps) // size) - one.shared_pages - one.private_pages
            for one in self.decoding
        )

    def _stop(self, sequence: SglangSequence, others: int) -> None:
        """Takes all pages from a member, and makes room for those who stay."""
        self._pages.release(sequence)
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self._cache.make_room(-(-others * RETRACT_DECODE_STEPS // self._config.block_size))
