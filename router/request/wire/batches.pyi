"""Batches of a RouteStream: requests in, results out, item by item (batches.pyx)."""

ITEMS_MAX: int
"""Items of a batch."""

class Batch:
    """A RouteBatch, item by item: `next` goes on to one, and the attributes are of that one."""

    def __init__(self, content: bytes, items_max: int = ITEMS_MAX) -> None:
        """Raises ValueError for bytes that are no batch, TooMuch for more items."""

    def __len__(self) -> int:
        """Items that are left."""

    def next(self) -> bool:
        """Whether there is another one."""

    @property
    def index(self) -> int: ...
    @property
    def timeout_ms(self) -> int: ...
    @property
    def cancel(self) -> bool: ...
    @property
    def request(self) -> bytes | None:
        """A RouteRequest's bytes; None for an item without."""

class Results:
    """A RouteResults message that grows."""

    def __len__(self) -> int: ...
    def add_answer(self, index: int, answer: bytes) -> None:
        """An item's RouteResponse."""

    def add_status(self, index: int, status: bytes) -> None:
        """An item's google.rpc.Status."""

    def take(self) -> bytes:
        """The message's bytes; the next one begins."""
