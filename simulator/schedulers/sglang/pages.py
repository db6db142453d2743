"""What SGLang's requests hold of the radix cache: found, taken, stored, given back. Pure."""

from collections.abc import Iterable

from simulator.engines.radix_cache import RadixCache, RadixNode
from simulator.schedulers.sglang.config import SglangConfig, SglangSequence


class SequencePages:
    """Keeps each sequence's account: shared pages are locked, the others are its own."""

    def __init__(self, config: SglangConfig, cache: RadixCache) -> None:
        self._size = config.block_size
        self._radix = config.radix_cache
        self._cache = cache

    def match(self, sequence: SglangSequence) -> tuple[RadixNode, int]:
        """Its longest cached prefix, short of its last token: the node in which that ends, and its
        pages. Counts as a use."""
        if not self._radix:
            return self._cache.root, 0
        pages = (sequence.known_tokens - 1) // self._size
        return self._cache.match(sequence.content.hashes(pages), pages)

    def found(self, sequence: SglangSequence) -> int:
        """The pages of that prefix. Changes nothing."""
        if not self._radix:
            return 0
        pages = (sequence.known_tokens - 1) // self._size
        return self._cache.find(sequence.content.hashes(pages), pages)

    def hold(self, sequence: SglangSequence, node: RadixNode, pages: int) -> None:
        """It has a prefix that `match` found, and that is locked for it by now."""
        sequence.node = node
        sequence.shared_pages = pages
        sequence.computed_tokens = pages * self._size

    def take(self, sequences: Iterable[SglangSequence], tokens: Iterable[int]) -> None:
        """Takes the pages that each lacks for so many tokens; there is room for them."""
        wanted = 0
        for sequence, count in zip(sequences, tokens, strict=True):
            own = -(-count // self._size) - sequence.shared_pages
            wanted += own - sequence.private_pages
            sequence.private_pages = own
        self._cache.take(wanted)

    def store(self, sequence: SglangSequence) -> None:
        """Puts into the tree what is computed of it, and locks that."""
        if not self._radix or sequence.node is None:
            return
        pages = sequence.computed_tokens // self._size
        node, found = self._cache.insert(sequence.content, pages)
        self._cache.give_back(found - sequence.shared_pages)  # what somebody else computed, too
        self._cache.unlock(sequence.node)
        self._cache.lock(node)
        sequence.node = node
        sequence.private_pages -= pages - sequence.shared_pages
        sequence.shared_pages = pages

    def release(self, sequence: SglangSequence) -> None:
        """Gives all its pages back: its own at once, shared ones to eviction."""
        if sequence.node is None:
            raise RuntimeError(f"{sequence.request_id} holds nothing")
        self._cache.give_back(sequence.private_pages)
        self._cache.unlock(sequence.node)
        sequence.node = None
        sequence.shared_pages = sequence.private_pages = sequence.extend_tokens = 0
