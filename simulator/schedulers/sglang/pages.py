"""The pages that SGLang's requests hold in the radix cache, from lookup to release. Pure."""

from collections.abc import Iterable

from simulator.engines.radix_cache import RadixCache, RadixNode
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence


class SequencePages:
    """Counts each sequence's pages: shared pages are locked, the others are private."""

    def __init__(self, config: SglangConfig, cache: RadixCache) -> None:
        self._size = config.block_size
        self._radix = config.radix_cache
        self._cache = cache

    def match(self, sequence: SglangSequence) -> tuple[RadixNode, int]:
        """The longest cached prefix, without the last token: the node in which it ends, and its
        pages. Counts as a use."""
        if not self._radix:
            return self._cache.root, 0
        pages = (sequence.known_tokens - 1) // self._size
        return self._cache.match(sequence.content.hashes(pages), pages)

    def cached_pages(self, sequence: SglangSequence) -> int:
        """Pages of the longest cached prefix. Changes nothing."""
        if not self._radix:
            return 0
        pages = (sequence.known_tokens - 1) // self._size
        return self._cache.find(sequence.content.hashes(pages), pages)

    def hold(self, sequence: SglangSequence, node: RadixNode, pages: int) -> None:
        """Gives a sequence the prefix that `match` returned; the caller has locked it."""
        sequence.node = node
        sequence.shared_pages = pages
        sequence.computed_tokens = pages * self._size

    def take(self, sequences: Iterable[SglangSequence], tokens: Iterable[int]) -> None:
        """Takes the missing pages of each sequence for its number of tokens; they must be free."""
        wanted = 0
        for sequence, count in zip(sequences, tokens, strict=True):
            own = -(-count // self._size) - sequence.shared_pages
            wanted += own - sequence.private_pages
            sequence.private_pages = own
        self._cache.take(wanted)

    def store(self, sequence: SglangSequence) -> None:
        """Puts the computed pages of a sequence into the tree, and locks them."""
        if not self._radix or sequence.node is None:
            return
        pages = sequence.computed_tokens // self._size
        node, known = self._cache.insert(sequence.content, pages)
        self._cache.give_back(known - sequence.shared_pages)  # other requests stored these as well
        self._cache.unlock(sequence.node)
        self._cache.lock(node)
        sequence.node = node
        sequence.private_pages -= pages - sequence.shared_pages
        sequence.shared_pages = pages

    def release(self, sequence: SglangSequence) -> None:
        """Gives all pages of a sequence back: private pages become free, shared pages evictable.
        Raises RuntimeError for a sequence without pages."""
        if sequence.node is None:
            raise RuntimeError(f"request {sequence.request_id} holds no pages to release")
        self._cache.give_back(sequence.private_pages)
        self._cache.unlock(sequence.node)
        sequence.node = None
        sequence.shared_pages = sequence.private_pages = sequence.extend_tokens = 0
