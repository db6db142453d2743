"""Waits that can't end in time, refused before they are over."""

from math import inf, nextafter

import pytest

from router.config.settings.queue_settings import BandSettings, TenantSettings, TenantsSettings
from router.decide.queue.admission_queue import LOOK_EACH_S, RETRY_MAX_S, AdmissionQueue
from router.decide.waiter import Fate, Waiter
from router.request.refusal import Reason
from tests.router.decide.queue.waiting import POOL, all_offered, check_counts, offered, queue_of

NOW_S = 10.0


def flowing(waiting: int, mode: str = "timeout", **settings: object) -> AdmissionQueue:
    """A queue of so many requests from which one went each second, up to NOW_S."""
    queue = queue_of(early_refusal=mode, **settings)
    for number in range(int(NOW_S) + waiting):
        offered(queue, f"w{number}", 0.0)
    for second in range(int(NOW_S)):
        queue.dispatched(next(queue.candidates(POOL, 0, second + 1.0)), 1, 0, second + 1.0)
    return queue


def expected_s(queue: AdmissionQueue) -> float:
    """Of a request that comes last."""
    wait_s = queue.band_waits_s(NOW_S)["all"]
    assert wait_s is not None
    return wait_s


@pytest.mark.parametrize("is_late", [False, True])
def test_a_newcomer_is_refused_from_its_expected_wait_on(is_late: bool) -> None:
    queue = flowing(8)
    due_s = NOW_S + expected_s(queue)
    if is_late:
        due_s = nextafter(due_s, 0.0)
    refusal = queue.too_long(POOL, Waiter("a", NOW_S, due_s), NOW_S)
    assert (refusal is not None) == is_late
    assert queue.counts[Fate.TOO_LONG] == is_late
    check_counts(queue)
    if refusal is not None:
        assert refusal.reason is Reason.WAIT_TOO_LONG
        assert "queue.early_refusal" in refusal.message


def test_the_caller_comes_back_once_its_wait_would_be_short_enough() -> None:
    queue = flowing(8)
    wait_s = expected_s(queue)
    refusal = queue.too_long(POOL, Waiter("a", NOW_S, NOW_S + wait_s - 5.0), NOW_S)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(5.0)
    refusal = queue.too_long(POOL, Waiter("b", NOW_S, NOW_S + wait_s - 50.0), NOW_S)
    assert refusal is not None
    assert refusal.retry_after_s == RETRY_MAX_S


@pytest.mark.parametrize(("mode", "refused"), [("timeout", False), ("slo", True)])
def test_a_time_to_the_first_token_counts_where_the_configuration_says_so(
    mode: str, refused: bool
) -> None:
    queue = flowing(8, mode)
    waiter = Waiter("a", NOW_S, inf, deadline_s=NOW_S + 1.0)
    assert (queue.too_long(POOL, waiter, NOW_S) is not None) == refused


def test_a_newcomer_of_higher_priority_has_its_place_in_front() -> None:
    queue = flowing(8)
    assert queue.too_long(POOL, Waiter("low", NOW_S, NOW_S + 3.0), NOW_S) is not None
    high = Waiter("high", NOW_S, NOW_S + 3.0, priority=5)
    assert queue.too_long(POOL, high, NOW_S) is None


def test_the_pace_of_none_in_front_is_never_held_against_a_request() -> None:
    queue = flowing(0)
    assert queue.too_long(POOL, Waiter("a", NOW_S, NOW_S), NOW_S) is None
    assert queue.too_long("another", Waiter("a", NOW_S, NOW_S), NOW_S) is None
    (first,) = (offered(queue, "a", NOW_S, expires_s=NOW_S + 1.0),)
    assert queue.too_long(POOL, first, NOW_S + 1e6) is None


def test_without_a_known_pace_none_is_refused() -> None:
    queue = queue_of(early_refusal="timeout")
    all_offered(queue, "abc")
    assert queue.too_long(POOL, Waiter("d", 0.0, 0.0), 0.0) is None


def test_waiting_requests_are_looked_at_in_slices_and_again_after_a_while() -> None:
    queue = queue_of(early_refusal="timeout")
    waiters = all_offered(queue, "abc")
    assert queue.take_doubtful(LOOK_EACH_S - 0.1, 9) == []
    assert queue.take_doubtful(LOOK_EACH_S, 2) == waiters[:2]
    assert queue.take_doubtful(LOOK_EACH_S, 2) == waiters[2:]
    assert queue.take_doubtful(LOOK_EACH_S, 2) == []
    queue.cancel(waiters[0], LOOK_EACH_S)
    assert queue.take_doubtful(2 * LOOK_EACH_S, 9) == waiters[1:]


def test_a_waiting_request_that_others_overtake_is_refused_before_its_time() -> None:
    queue = flowing(1)
    waiter = offered(queue, "a", NOW_S, expires_s=NOW_S + 4.0)
    assert queue.too_long(POOL, waiter, NOW_S) is None
    for number in range(8):
        offered(queue, f"high{number}", NOW_S, priority=5)
    assert queue.too_long(POOL, waiter, NOW_S) is not None
    assert not waiter.waits
    check_counts(queue)


def test_without_early_refusal_nothing_is_kept_for_it() -> None:
    queue = queue_of()
    offered(queue, "a")
    assert not queue.refuses_early
    assert queue.take_doubtful(1e6, 9) == []


def test_settings_put_in_force_count_for_those_that_wait() -> None:
    queue = flowing(3, "never")
    queue.configure(flowing(0).settings, NOW_S)
    assert len(queue.take_doubtful(NOW_S + LOOK_EACH_S, 9)) == 3


def places(queue: AdmissionQueue, **about: object) -> float:
    """Of a newcomer, and of the same request once it waits."""
    before = queue._pools[POOL].places(Waiter("new", NOW_S, seq=99, **about), NOW_S)  # type: ignore[arg-type]
    waiter = offered(queue, "new", NOW_S, **about)
    assert queue._pools[POOL].places(waiter, NOW_S) == before
    queue.cancel(waiter, NOW_S)
    return before


def test_a_place_goes_by_the_weights_of_bands() -> None:
    bands = (BandSettings("low", 0), BandSettings("high", 10, weight=3.0))
    queue = queue_of(bands=bands, bands_aging=0.0)
    for number in range(8):
        offered(queue, f"l{number}", priority=0)
        offered(queue, f"h{number}", priority=10)
    assert places(queue, priority=10) == 12  # 9 of this band, and 3 of the other
    assert places(queue, priority=0) == 17  # no more than there are
    queue.configure(queue_of(bands=bands, bands_aging=0.0, bands_strict=True).settings, NOW_S)
    assert places(queue, priority=10) == 9
    assert places(queue, priority=0) == 17


def test_a_place_goes_by_the_weights_of_tenants() -> None:
    gold = {"gold": TenantSettings(weight=4.0)}
    queue = queue_of(tenants=TenantsSettings(fair=True, named=gold))
    for number in range(8):
        offered(queue, f"b{number}", tenant="blue")
    assert places(queue, tenant="gold") == 1.25
    assert places(queue, tenant="red") == 2
    for number in range(7):
        offered(queue, f"g{number}", tenant="gold")
    assert places(queue, tenant="gold") == 10
    assert places(queue, tenant="blue") == 16
    for waiter in [*queue.find("g0"), *queue.find("b0")]:
        queue.cancel(waiter, NOW_S)
    assert places(queue, tenant="gold") == 7 * 5 / 4
