"""The histograms of an engine's requests."""

import pytest

from simulator.live.latencies import Histogram, Latencies


def test_a_bucket_counts_what_is_at_most_its_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.0, 0.1, 0.2, 1.0, 5.0):
        histogram.observe(seconds)
    assert list(histogram.buckets()) == [("0.1", 2), ("1.0", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum_s) == (5, pytest.approx(6.3))


def test_a_request_is_seen_in_every_histogram() -> None:
    latencies = Latencies()
    latencies.first_token(1.0)
    latencies.ended(queue_s=0.4, ttft_s=1.0, e2e_s=3.0, output_tokens=5)
    latencies.first_token(1.0)
    latencies.ended(queue_s=0.0, ttft_s=1.0, e2e_s=1.0, output_tokens=1)
    sums = {name: one.sum_s for name, one in latencies.histograms.items()}
    assert sums == {
        "vllm:time_to_first_token_seconds": 2.0,
        "vllm:request_time_per_output_token_seconds": 0.5,
        "vllm:e2e_request_latency_seconds": 4.0,
        "vllm:request_queue_time_seconds": 0.4,
    }
