"""The native twin of events.engines.skipping_reference: see skipping.pyx."""

def skip(data: bytes, at: int, left: int, steps: int) -> tuple[int, int]:
    """See events.engines.skipping_reference.skip."""
