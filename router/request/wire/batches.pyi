"""Batches of a RouteStream: requests in, results out, item by item (batches.pyx)."""

ITEMS_MAX: int
"""Most items of a batch."""

class Batch:
    """Reads a RouteBatch: `next` goes to the next item, which the attributes then describe."""

    def __init__(self, content: bytes, items_max: int = ITEMS_MAX) -> None:
        """Raises ValueError for bytes that are no batch, TooMuch for over items_max items."""

    def __len__(self) -> int:
        """Items that are left."""

    def next(self) -> bool:
        """Goes to the next item; returns whether there is one."""

    @property
    def index(self) -> int: ...
    @property
    def timeout_ms(self) -> int: ...
    @property
    def cancel(self) -> bool: ...
    @property
    def request(self) -> bytes | None:
        """Bytes of the item's RouteRequest; None: it has none."""

class Results:
    """A RouteResults message that grows."""

    def __len__(self) -> int: ...
    def add_answer(self, index: int, answer: bytes) -> None:
        """Adds the RouteResponse of the item with this index."""

    def add_status(self, index: int, status: bytes) -> None:
        """Adds the google.rpc.Status of the item with this index."""

    def take(self) -> bytes:
        """The message's bytes; then begins an empty message."""
