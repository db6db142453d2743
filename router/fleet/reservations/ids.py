"""Ids of reservations, `<replica>-<token>`, which can't be guessed.

A Report may end a reservation, and its id is the right to do so: a token is 64 bits of a source
that nobody can predict, as 16 hexadecimal digits. The token holds no `-`, so that the replica's
name is all before the last `-` of an id, as all releases read it.

Law: the same source of bytes gives the same ids.
"""

from collections.abc import Callable

TOKEN_BYTES = 8
DRAWN = 256
"""Tokens drawn at once: 2 KiB, so that an id costs a small part of a call to the source."""


class ReservationIds:
    """Makes the ids of one replica's reservations."""

    def __init__(self, replica: str, random_bytes: Callable[[int], bytes]) -> None:
        """random_bytes: os.urandom, or a seeded function in simulations and tests."""
        self._prefix = f"{replica}-"
        self._random_bytes = random_bytes
        self._drawn: list[str] = []
        """Ids that `next` will return, the last one first."""

    def next(self) -> str:
        """Returns an id that no reservation has had."""
        if not self._drawn:
            self._draw()
        return self._drawn.pop()

    def _draw(self) -> None:
        digits = self._random_bytes(DRAWN * TOKEN_BYTES).hex()
        length = 2 * TOKEN_BYTES
        self._drawn += [
            self._prefix + digits[i : i + length] for i in range(0, len(digits), length)
        ]
