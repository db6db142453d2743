"""The native twin of events.skipping_reference: see skipping.pyx."""

def skip(data: bytes, at: int, left: int, steps: int) -> tuple[int, int]:
    """See events.skipping_reference.skip."""
