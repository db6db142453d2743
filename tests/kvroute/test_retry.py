"""What is tried again, and when: numbers worked out by hand."""

import random
from typing import Any

import grpc
import pytest
from typing_extensions import override

from kvroute.client import RetryPolicy, error_from_status
from tests.kvroute.scripted_router import status

POLICY = RetryPolicy(attempts=4, backoff_s=0.1, backoff_s_max=0.3)
UNAVAILABLE = error_from_status(status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER"))


class Highest(random.Random):
    """Draws the upper end."""

    @override
    def uniform(self, a: float, b: float) -> float:
        return b


def delay(error: Any, attempt: int = 1, left_s: float = 5.0) -> float | None:
    return POLICY.delay_s(error, attempt, left_s, Highest())


def test_the_backoff_doubles_up_to_its_limit_and_ends_with_the_attempts() -> None:
    delays = [delay(UNAVAILABLE, attempt) for attempt in (1, 2, 3, 4)]
    assert delays == [0.1, 0.2, 0.3, None]


def test_the_jitter_is_full() -> None:
    rng = random.Random(7)
    drawn = [POLICY.delay_s(UNAVAILABLE, 3, 5.0, rng) or 0.0 for _ in range(1000)]
    assert 0.0 <= min(drawn) < 0.01
    assert 0.29 < max(drawn) <= 0.3


def test_no_delay_is_shorter_than_the_router_asked() -> None:
    full = error_from_status(
        status(grpc.StatusCode.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", retry_after_s=2.0)
    )
    assert delay(full, 1) == 2.1
    assert delay(full, 2) == 2.2
    later = error_from_status(status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", retry_after_s=1.5))
    assert delay(later) == 1.6


def test_a_delay_past_the_deadline_gives_up_at_once() -> None:
    assert delay(UNAVAILABLE, left_s=0.1) is None
    assert delay(UNAVAILABLE, left_s=0.11) == 0.1


def test_resource_exhausted_without_retry_info_is_not_tried_again() -> None:
    assert delay(error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED))) is None


@pytest.mark.parametrize(
    "code",
    [
        code
        for code in grpc.StatusCode
        if code
        not in {
            grpc.StatusCode.OK,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
    ],
)
def test_no_other_status_is_tried_again_even_with_retry_info(code: grpc.StatusCode) -> None:
    assert delay(error_from_status(status(code, "ANY", retry_after_s=0.0))) is None


@pytest.mark.parametrize(
    "fields", [{"attempts": 0}, {"backoff_s": -1.0}, {"backoff_s": 3.0, "backoff_s_max": 2.0}]
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"attempts|backoff"):
        RetryPolicy(**fields)
