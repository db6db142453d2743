"""Blocks that an engine holds and its stream leaves out: which, and why. Pure.

What has no name by its content, or no place in the map, is left out; a request may ask for it
all the same, so that the stream says so until it is gone.

Law: a reason holds until each block left out for it is told gone, or all is cleared.
"""

from collections import Counter
from collections.abc import Iterable

from indexer.identity import EngineHash

BLOCKS_MAX = 1 << 16
"""Left-out blocks that are known one by one, 8 MiB; over it a reason holds until all is cleared."""

SALTS_UNTOLD = "salts_untold"
ITEMS_UNTOLD = "items_untold"

REASONS = {
    "block_size_changed": "the engine tells blocks of another size than before",
    "block_size_unsuitable": "the engine's blocks can be neither split nor merged to the block size"
    " that is configured",
    ITEMS_UNTOLD: "prompts come with images or other items, and SGLang tells these as pad values in"
    " the place of their tokens: such a prompt matches up to its first item only",
    "item_place_unknown": "blocks with images or other items can't be split or merged, because"
    " events don't tell the place of an item in its block: leave out the relay's block_size",
    "map_full": "the engine holds more blocks than a relay's map does",
    SALTS_UNTOLD: "prompts come with cache salts, and this release of the engine leaves them out of"
    " its events (vLLM before 0.17, SGLang before 0.5.20): what it caches for a salt counts as"
    " everybody's, and salted prompts are known by this router's own picks; upgrade the engine",
    "too_many_groups": "the engine has more KV cache groups than a relay counts",
    "unknown_medium": "the engine names a storage medium that kvroute doesn't know",
    "unknown_parent": "blocks came after a block that the relay doesn't know",
    "unnamed_lora": "the engine names LoRAs by number only (vLLM tells names from 0.14 on)",
    "unresolved": "blocks came without tokens, on another tier, and the relay doesn't know them",
}
"""Reason -> a sentence for people."""


class LeftOut:
    """The blocks of one engine rank that its stream leaves out."""

    def __init__(self) -> None:
        self._copies: dict[EngineHash, list[str]] = {}
        """Why each copy was left out."""
        self._of: Counter[str] = Counter()
        """Reason -> copies"""
        self._for_good: set[str] = set()
        """Reasons of blocks that are not known one by one."""

    def add(self, reason: str, blocks: Iterable[EngineHash]) -> None:
        """Copies of these blocks were left out."""
        for block in blocks:
            if reason in self._for_good:
                return
            if len(self._copies) >= BLOCKS_MAX or self._of[reason] >= BLOCKS_MAX:
                self._for_good.add(reason)
                return
            self._copies.setdefault(block, []).append(reason)
            self._of[reason] += 1

    def add_all(self, reasons: Iterable[str]) -> None:
        """Something was left out, and nobody knows what."""
        self._for_good.update(reasons)

    def remove(self, block: EngineHash) -> None:
        """A copy of a block is gone; one that was not left out is fine."""
        copies = self._copies.get(block)
        if copies is None:
            return
        self._of[copies.pop()] -= 1
        if not copies:
            del self._copies[block]

    def clear(self) -> dict[EngineHash, list[str]]:
        """The engine holds nothing. Returns the blocks, whose memory is the caller's to let go."""
        copies, self._copies = self._copies, {}
        self._of.clear()
        self._for_good.clear()
        return copies

    def reasons(self) -> tuple[str, ...]:
        """Why something is left out now; empty when nothing is."""
        return tuple(sorted(self._for_good | {reason for reason, n in self._of.items() if n}))
