"""Which releases of an engine tell the cache salt of a block in their KV events. Pure."""

import re

FIRST_RELEASES = {"vllm": (0, 17), "sglang": (0, 5, 20)}
"""vLLM: `extra_keys` of BlockStored; SGLang: `cache_salt`. Source: the wheels of 0.9.2 to 0.32.0,
and of 0.4.6.post5 to 0.5.23."""


def tells_salts(engine: str, version: str) -> bool:
    """False for a release that is known not to; a version that is not known may."""
    first = FIRST_RELEASES.get(engine)
    numbers = tuple(map(int, re.findall(r"\d{1,9}", version)[:3]))
    return first is None or not numbers or numbers >= first
