"""Responses and their workers: bounds."""

from router.gateway.response_workers import ResponseWorkers


def test_a_response_is_known_by_its_worker_until_its_time_is_over() -> None:
    responses = ResponseWorkers(most=4, ttl_s=10.0)
    responses.add("a", "w0", 0.0)
    assert responses.worker("a", 9.9) == "w0"
    assert responses.worker("a", 10.0) is None
    assert responses.worker("b", 0.0) is None
    responses.add("b", "w1", 10.0)
    assert len(responses) == 1


def test_past_the_bound_the_oldest_response_is_forgotten() -> None:
    responses = ResponseWorkers(most=2, ttl_s=10.0)
    for number, name in enumerate(("a", "b", "a", "c")):
        responses.add(name, "w0", float(number))
    assert len(responses) == 2
    assert [name for name in "abc" if responses.worker(name, 4.0)] == ["a", "c"]
