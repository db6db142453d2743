"""Latencies of requests, in the histograms that vLLM 0.32 publishes. Pure."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Numbers of observations by upper bound, in seconds."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self._counts[bisect_left(self._bounds_s, seconds)] += 1

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound, observations up to it), in order, "+Inf" last."""
        bounds = [*map(str, self._bounds_s), "+Inf"]
        return zip(bounds, accumulate(self._counts), strict=True)


class Latencies:
    """The histograms of an engine's latencies, by vLLM's names."""

    def __init__(self) -> None:
        self._first_token = Histogram(_FIRST_TOKEN_S)
        self._ended = (Histogram(_TOKEN_S), Histogram(_REQUEST_S), Histogram(_REQUEST_S))
        per_token, e2e, queue = self._ended
        self.histograms = {
            "vllm:time_to_first_token_seconds": self._first_token,
            "vllm:request_time_per_output_token_seconds": per_token,
            "vllm:e2e_request_latency_seconds": e2e,
            "vllm:request_queue_time_seconds": queue,
        }

    def first_token(self, ttft_s: float) -> None:
        """Observes the time to a request's first token when it is out; vLLM observes the rest at
        the end."""
        self._first_token.observe(ttft_s)

    def ended(self, *, queue_s: float, ttft_s: float, e2e_s: float, output_tokens: int) -> None:
        """Observes the latencies of a request that has ended. Without a second token, its time per
        token is 0, as in vLLM."""
        per_token_s = (e2e_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else 0.0
        for histogram, seconds in zip(self._ended, (per_token_s, e2e_s, queue_s), strict=True):
            histogram.observe(seconds)
