"""A request's body at the picker, from its first part until it has gone back to Envoy. Pure.

Laws:
- its bytes go back as they came, in the order in which they came;
- a turn of the loop sends one slice, of SLICE_BYTES at most, in which a part of fewer than
  SMALL_BYTES counts as SMALL_BYTES.
"""

from collections import deque

from typing_extensions import override

from router.gateway.picker.messages import PART_BYTES_MAX, Part, streamed

SLICE_BYTES = 16 * PART_BYTES_MAX
SMALL_BYTES = 1000


class HeldBody(deque[Part]):
    """Parts of one request's body that were not yet sent back to Envoy."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """Bytes that wait for the pick, and count against the bounds on bodies."""

    def pieces(self) -> tuple[bytes | memoryview, ...]:
        """The held parts of the body, not copied."""
        return tuple(part.body for part in self)

    def take(self) -> list[bytes]:
        """Removes the next slice, and returns the messages that send it back."""
        out: list[bytes] = []
        left = SLICE_BYTES
        while self and left > 0:
            part = self.popleft()
            if len(part.body) > left:
                cut = left - left % PART_BYTES_MAX
                if not cut:
                    self.appendleft(part)
                    break
                self.appendleft(Part(part.body[cut:], part.is_last, None))
                part = Part(part.body[:cut], False, None)
            left -= max(len(part.body), SMALL_BYTES)
            out += streamed(part, of_answer=False)
        return out

    @override
    def clear(self) -> None:
        super().clear()
        self.bytes = 0
