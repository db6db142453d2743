"""Counts of tokens from the `usage` in an engine's answer.

vLLM and SGLang put the count into `usage.prompt_tokens_details.cached_tokens`, and only if they
were started with a flag: `--enable-prompt-tokens-details` (vLLM), `--enable-cache-report` (SGLang).
With the flag, null means 0 in every release that sends null:

    vLLM 0.9 to 0.22            null when nothing was reused
    vLLM after pull 44383       0 when nothing was reused (merged 2026-06)
    SGLang 0.4.6 to 0.5.23      null when nothing was reused
                                (UsageProcessor._details_if_cached, as of 2026-10)

Without the flag, null means unknown. No answer shows whether the flag is set, so the caller says
it. A router without reports of misses can't notice that its predictions are wrong.

Law: never raises, whatever the engine answered; anything but a count is None.
"""

from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

COUNT_MAX = (1 << 32) - 1
"""The largest count in a report."""


def cached_tokens(usage: Any, *, details_enabled: bool) -> int | None:
    """The prompt tokens that the engine reused; None: unknown, and absent in the report.

    usage: the object of the JSON, or of the openai package; None is fine. details_enabled: whether
    the engine runs with the flag that makes it report cached tokens, so that null means 0.
    """
    if usage is None:
        return None
    reported = _field(_field(usage, "prompt_tokens_details"), "cached_tokens")
    if reported is None:
        # Without prompt_tokens this is no usage: a misread chunk must not count as a miss.
        prompt_tokens = count(_field(usage, "prompt_tokens"))
        return 0 if details_enabled and prompt_tokens is not None else None
    return count(reported)


class Usage(NamedTuple):
    """Tokens of a request, as the engine counted them; None: unknown."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


def read_usage(usage: Any, *, details_enabled: bool) -> Usage:
    """The counts in a usage of chats, completions, responses or Anthropic's messages.

    usage, details_enabled: as for cached_tokens(). Anthropic's usage counts tokens that were read
    from a cache, and tokens that were written to it, beside `input_tokens`. Engines differ on
    whether input_tokens includes those read, so prompt_tokens is None if some were read and none
    written is reported (vLLM reports both).
    """
    if (prompt := count(_field(usage, "prompt_tokens"))) is not None:
        cached = cached_tokens(usage, details_enabled=details_enabled)
        return Usage(prompt, count(_field(usage, "completion_tokens")), cached)
    prompt, output = count(_field(usage, "input_tokens")), count(_field(usage, "output_tokens"))
    if (details := _field(usage, "input_tokens_details")) is not None:
        return Usage(prompt, output, count(_field(details, "cached_tokens")))
    cached = count(_field(usage, "cache_read_input_tokens"))
    stored = count(_field(usage, "cache_creation_input_tokens"))
    if prompt is not None and stored:
        prompt += (cached or 0) + stored
    elif cached:
        prompt = None
    return Usage(prompt, output, cached)


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
