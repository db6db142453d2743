"""Cached tokens out of the `usage` that an engine answers with.

vLLM and SGLang put the count into `usage.prompt_tokens_details.cached_tokens`, and only if they
were started with a flag: `--enable-prompt-tokens-details` (vLLM), `--enable-cache-report` (SGLang).
With the flag, a null means 0 in every release that sends one:

    vLLM 0.9 to 0.22            null when nothing was reused
    vLLM after pull 44383       0 when nothing was reused (merged 2026-06)
    SGLang 0.4.6 to 0.5.23      null when nothing was reused
                                (UsageProcessor._details_if_cached, as of 2026-10)

Without the flag a null says nothing. No answer tells which of both it is, so the caller has to. A
router that never hears of misses can't notice that its predictions are wrong.

Law: never raises, whatever the engine answered; what is no count is None.
"""

from collections.abc import Mapping
from operator import index
from typing import Any

COUNT_MAX = (1 << 32) - 1
"""As much as a report carries."""


def cached_tokens(usage: Any, *, details_enabled: bool) -> int | None:
    """The prompt tokens that the engine reused; None: unknown, which is what a report then says.

    usage: the object as the JSON has it, or as the openai package makes it; None is fine.
    details_enabled: whether the engine runs with the flag above, so that a null means 0.
    """
    if usage is None:
        return None
    told = _field(_field(usage, "prompt_tokens_details"), "cached_tokens")
    if told is None:
        # A usage without a prompt is none: a misread chunk must not count as a miss.
        prompt_tokens = count(_field(usage, "prompt_tokens"))
        return 0 if details_enabled and prompt_tokens is not None else None
    return count(told)


def count(value: Any) -> int | None:
    """A number of tokens that fits a report; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = index(value)
    except TypeError:
        return None
    return number if 0 <= number <= COUNT_MAX else None


def _field(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)
