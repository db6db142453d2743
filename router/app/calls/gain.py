"""What a model would gain by kvroute, estimated from requests that another router serves. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvroute.v1 import Observed, WorkerStatus


class Gain(NamedTuple):
    """Numbers of one model today, and estimated for kvroute; None: unknown, since its engines
    report nothing, or its requests are too few."""

    model: str
    requests: int
    share_today: float | None
    """Share (0 to 1) of prompt tokens that came from caches."""
    share: float
    """Share of prompt tokens that would have come from caches by this router's picks."""
    ttft_ms_today: float | None
    """Mean time to the first token at the engine, ms."""
    ttft_ms: float | None
    """Mean time to the first token estimated for this router's picks, ms."""
    ttft_error: float | None
    """Relative error of the estimate, where it is made for today's picks."""


def gains(workers: Sequence[WorkerStatus]) -> list[Gain]:
    """The gain of each model with observed requests, sorted by the model's name."""
    models: dict[str, list[Observed]] = {}
    for worker in workers:
        if worker.HasField("observed"):
            models.setdefault(worker.model, []).append(worker.observed)
    return [_gain(model, rows) for model, rows in sorted(models.items())]


def _gain(model: str, rows: list[Observed]) -> Gain:
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    today = [row for row in rows if row.HasField("cached_share_today")]
    first = [row for row in rows if row.HasField("ttft_ms_today")]
    estimated = [row for row in rows if row.HasField("estimated_ttft_ms")]
    errors = [row.ttft_error for row in rows if row.HasField("ttft_error")]
    return Gain(
        model,
        sum(row.picks for row in rows),
        # Engines that count no tokens report a share alone, and count alike.
        _mean((row.cached_share_today, row.prompt_tokens_today or 1) for row in today),
        sum(row.cached_tokens for row in rows) / prompt_tokens if prompt_tokens else 0.0,
        _mean((row.ttft_ms_today, row.first_tokens_today) for row in first),
        _mean((row.estimated_ttft_ms, row.estimated_picks) for row in estimated),
        errors[0] if errors else None,
    )


def _mean(weighted: Iterable[tuple[float, int]]) -> float | None:
    pairs = list(weighted)
    weight = sum(of for _, of in pairs)
    return sum(value * of for value, of in pairs) / weight if weight else None


def gain_text(gain: Gain) -> str:
    """A model's gain as one line of text."""
    today = "?" if gain.share_today is None else f"{gain.share_today:.0%}"
    parts = [
        f"{gain.model}: {today} of prompt tokens come from caches today, {gain.share:.0%} would"
        " by kvroute"
    ]
    if gain.ttft_ms_today is not None:
        first = f"first token {gain.ttft_ms_today:,.0f} ms"
        if gain.ttft_ms is not None:
            error = "?" if gain.ttft_error is None else f"{gain.ttft_ms * gain.ttft_error:,.0f}"
            first += f" -> {gain.ttft_ms:,.0f} ms (estimated, ± {error})"
        parts.append(first)
    parts.append(f"{gain.requests:,} requests")
    return "; ".join(parts)


def shares_text(worker: WorkerStatus) -> tuple[str, str]:
    """Shares of prompt tokens from a worker's cache, as texts: today's, and that of this router's
    picks."""
    observed = worker.observed
    today = observed.cached_share_today if observed.HasField("cached_share_today") else None
    ours = observed.cached_tokens / observed.prompt_tokens if observed.prompt_tokens else None
    return _share_text(today), _share_text(ours)


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
