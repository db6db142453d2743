"""Bounds on the bytes that a port keeps in memory, received or to be sent. Pure.

Counted as held are: messages as they came, compressed or not, until their handlers take them; bytes
of answers that a peer has no room for yet; for each open stream STREAM_BYTES, or its headers if
they are more, and HANDLER_BYTES more if its handler is streaming.

Laws:
- a connection holds HELD_MAX bytes at most: what would exceed that ends its call;
- a port holds PORT_HELD_MAX bytes at most: what would exceed that ends the connection that holds
  most;
- what is over, sent or taken is held no longer, and a closed connection holds nothing.
"""

from collections.abc import Callable

HELD_MAX = 128 << 20
PORT_HELD_MAX = 256 << 20
STREAM_BYTES = 2048
"""Bytes counted for an open stream with headers of no more bytes than these, besides those that
wait in it: roughly its memory."""
HANDLER_BYTES = 8192
"""Bytes counted for the task of a streaming call's handler: roughly its memory."""
MESSAGE_BYTES = 128
"""Bytes counted for a message that waits for its handler, besides its content."""


class PortHeld:
    """Bytes kept for all connections of one port."""

    def __init__(self, bytes_max: int = PORT_HELD_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.connections: set[Held] = set()

    def relieve(self) -> None:
        """Closes connections, the one with the most bytes first, until the port is within its
        bound.
        """
        while self.bytes > self.bytes_max and self.connections:
            most = max(self.connections, key=lambda held: held.bytes)
            drop = most.drop
            most.close()
            drop()


class Held:
    """Bytes kept for one connection, counted for its port as well."""

    def __init__(self, port: PortHeld, drop: Callable[[], None], bytes_max: int = HELD_MAX) -> None:
        """drop: closes the connection, when its port holds too much."""
        self.bytes = 0
        self.bytes_max = bytes_max
        self.drop = drop
        self._port = port
        self._open = False

    def open(self) -> None:
        """Called when the connection is made; before, `take` takes no bytes."""
        self._open = True
        self._port.connections.add(self)

    def take(self, size: int) -> bool:
        """Adds bytes; False: none were added, since they would exceed the bound, or the connection
        is not open."""
        held = self.bytes + size
        if held > self.bytes_max or not self._open:
            return False
        self.bytes = held
        port = self._port
        port.bytes += size
        if port.bytes > port.bytes_max:
            port.relieve()
        return True

    def free(self, size: int) -> None:
        """Subtracts bytes."""
        if self._open:
            self.bytes -= size
            self._port.bytes -= size

    def close(self) -> None:
        """Subtracts all bytes of the connection, which is over."""
        if self._open:
            self._open = False
            self.drop = lambda: None
            self._port.connections.discard(self)
            self._port.bytes -= self.bytes
            self.bytes = 0
