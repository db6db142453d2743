"""Left-out blocks: held by an engine and not in its stream, with the reasons. Pure.

A block that can't be named by its content, or doesn't fit in the ledger, is left out. A request may
match it all the same, so the stream gives the reason until the block is gone.

Law: a reason holds until each block left out for it is reported gone, or all are cleared.
"""

from collections import Counter
from collections.abc import Iterable

from indexer.identity import EngineHash

BLOCKS_MAX = 1 << 16
"""Most left-out blocks tracked one by one (8 MiB); past it a reason holds until `clear`."""

SALTS_UNTOLD = "salts_untold"
ITEMS_UNTOLD = "items_untold"

REASONS = {
    "block_size_changed": "the engine's events have another block size than before",
    "block_size_unsuitable": "the engine's blocks can't be split or merged to the configured block"
    " size",
    ITEMS_UNTOLD: "prompts come with images or other items, and SGLang's events have pad values"
    " instead of their tokens: such a prompt matches up to its first item only",
    "item_place_unknown": "blocks with images or other items can't be split or merged, because"
    " events don't have the place of an item in its block: leave out the relay's block_size",
    "ledger_full": "the engine holds more blocks than a relay's ledger can",
    SALTS_UNTOLD: "prompts come with cache salts, and this release of the engine leaves them out of"
    " its events (vLLM before 0.17, SGLang before 0.5.20): blocks cached for a salt match all"
    " prompts, and salted prompts are predicted from this router's own picks; upgrade the engine",
    "too_many_groups": "the engine has more KV cache groups than a relay counts",
    "unknown_medium": "the engine names a storage medium that kvroute doesn't know",
    "unknown_parent": "blocks came after a block that the relay doesn't know",
    "unnamed_lora": "the engine's events have only numbers of LoRAs (vLLM's have names from 0.14)",
    "unresolved": "blocks came without tokens, on another tier, and the relay doesn't know them",
}
"""Reason for which blocks are left out -> a sentence that explains it to an operator."""


class LeftOut:
    """The blocks of one engine rank that its stream leaves out."""

    def __init__(self) -> None:
        self._copies: dict[EngineHash, list[str]] = {}
        """Block -> the reason of each left-out copy"""
        self._of: Counter[str] = Counter()
        """Reason -> left-out copies"""
        self._for_good: set[str] = set()
        """Reasons that hold until `clear`: their blocks are not tracked one by one."""

    def add(self, reason: str, blocks: Iterable[EngineHash]) -> None:
        """Records copies of blocks that were left out, with the reason."""
        for block in blocks:
            if reason in self._for_good:
                return
            if len(self._copies) >= BLOCKS_MAX or self._of[reason] >= BLOCKS_MAX:
                self._for_good.add(reason)
                return
            self._copies.setdefault(block, []).append(reason)
            self._of[reason] += 1

    def add_all(self, reasons: Iterable[str]) -> None:
        """Records that blocks, which ones is unknown, were left out for these reasons."""
        self._for_good.update(reasons)

    def remove(self, block: EngineHash) -> None:
        """Records that a copy of a block is gone; does nothing for a block that was not
        left out.
        """
        copies = self._copies.get(block)
        if copies is None:
            return
        self._of[copies.pop()] -= 1
        if not copies:
            del self._copies[block]

    def clear(self) -> None:
        """Records that the engine holds no blocks."""
        self._copies = {}
        self._of.clear()
        self._for_good.clear()

    def reasons(self) -> tuple[str, ...]:
        """Reasons that hold now; empty: nothing is left out."""
        return tuple(sorted(self._for_good | {reason for reason, n in self._of.items() if n}))
