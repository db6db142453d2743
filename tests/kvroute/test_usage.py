"""What engines say of reused tokens, and what they leave out."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvroute.client import cached_tokens

# As vLLM 0.32.0 answered (the captures that tests/golden is made of), and as 0.20.2 does when
# nothing was reused.
VLLM_NULL = {
    "prompt_tokens": 96,
    "total_tokens": 100,
    "completion_tokens": 4,
    "prompt_tokens_details": None,
    "completion_tokens_details": None,
}
VLLM_STREAMED = {"prompt_tokens": 96, "total_tokens": 100, "completion_tokens": 4}
VLLM_REUSED = VLLM_NULL | {"prompt_tokens_details": {"cached_tokens": 64}}
VLLM_NEW_MISS = VLLM_NULL | {
    "prompt_tokens_details": {
        "audio_tokens": None,
        "cached_tokens": 0,
        "created_cache_tokens": 0,
        "multimodal_tokens": None,
    }
}
SGLANG_NULL = {
    "prompt_tokens": 48,
    "total_tokens": 52,
    "completion_tokens": 4,
    "prompt_tokens_details": None,
    "reasoning_tokens": 0,
}
SGLANG_REUSED = SGLANG_NULL | {"prompt_tokens_details": {"cached_tokens": 32}}
SGLANG_IMAGE_MISS = SGLANG_NULL | {
    "prompt_tokens_details": {"cached_tokens": None, "image_tokens": 16}
}


@dataclass
class Details:
    cached_tokens: int | None
    audio_tokens: int | None = None


@dataclass
class Usage:
    """As the openai package makes it."""

    prompt_tokens: int
    prompt_tokens_details: Details | None


@pytest.mark.parametrize(
    ("usage", "reused"),
    [
        (VLLM_NULL, 0),
        (VLLM_STREAMED, 0),
        (VLLM_REUSED, 64),
        (VLLM_NEW_MISS, 0),
        (SGLANG_NULL, 0),
        (SGLANG_REUSED, 32),
        (SGLANG_IMAGE_MISS, 0),
        (Usage(96, None), 0),
        (Usage(96, Details(None)), 0),
        (Usage(96, Details(80)), 80),
    ],
)
def test_with_the_flag_a_null_means_that_nothing_was_reused(usage: Any, reused: int) -> None:
    assert cached_tokens(usage, details_enabled=True) == reused


@pytest.mark.parametrize(
    ("usage", "reused"),
    [
        (VLLM_NULL, None),
        (VLLM_STREAMED, None),
        (VLLM_REUSED, 64),
        (VLLM_NEW_MISS, 0),
        (SGLANG_NULL, None),
        (Usage(96, None), None),
        (Usage(96, Details(80)), 80),
    ],
)
def test_without_the_flag_a_null_says_nothing(usage: Any, reused: int | None) -> None:
    assert cached_tokens(usage, details_enabled=False) == reused


@pytest.mark.parametrize("told", [-1, 1 << 32, True, 1.5, "64", [64], {"a": 1}, float("nan")])
def test_what_is_no_count_is_unknown(told: Any) -> None:
    usage = VLLM_NULL | {"prompt_tokens_details": {"cached_tokens": told}}
    assert cached_tokens(usage, details_enabled=True) is None


@pytest.mark.parametrize("usage", [None, {}, [], "usage", 7, {"prompt_tokens": "96"}, object()])
def test_what_is_no_usage_is_unknown(usage: Any) -> None:
    assert cached_tokens(usage, details_enabled=True) is None


@pytest.mark.parametrize("details", [[], "details", 7])
def test_details_of_another_making_are_no_count(details: Any) -> None:
    usage = VLLM_NULL | {"prompt_tokens_details": details}
    assert cached_tokens(usage, details_enabled=False) is None
