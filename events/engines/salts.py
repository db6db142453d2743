"""Engine releases whose KV events have the cache salt of a block. Pure."""

import re

FIRST_RELEASES = {"vllm": (0, 17), "sglang": (0, 5, 20)}
"""First release of each engine with salts in its events. vLLM: `extra_keys` of BlockStored; SGLang:
`cache_salt`. Source: the wheels of 0.9.2 to 0.32.0, and of 0.4.6.post5 to 0.5.23."""


def tells_salts(engine: str, version: str) -> bool:
    """Whether this release's events have cache salts; True for unknown engines and versions."""
    first = FIRST_RELEASES.get(engine)
    numbers = tuple(map(int, re.findall(r"\d{1,9}", version)[:3]))
    return first is None or not numbers or numbers >= first
