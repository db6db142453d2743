"""Prefixes that a worker's prompts used lately, sampled by their hash. Pure."""

from indexer.hashing import HashArray

class RecentBlocks:
    """The distinct prefixes in the order of their last use; 32 to 64 bytes each."""

    def __init__(self, sample: int) -> None:
        """sample: prefixes that are multiples of it are kept, all others ignored; a power of two.

        Raises ValueError.
        """

    def __len__(self) -> int: ...
    def use(self, prefixes: HashArray, now_s: float) -> None:
        """Records that these prefixes are used now, the last one last. Times may not go back.

        Raises MemoryError; some of the prefixes may have been taken then.
        """

    def drop_oldest(self, count: int) -> int:
        """Drops the prefixes that were used longest ago. Returns how many there were to drop."""

    def drop_before(self, time_s: float) -> int:
        """Drops the prefixes that were last used before a time. Returns how many."""

    def entries(self) -> list[tuple[int, float]]:
        """Prefixes and when each was last used, the oldest first."""
