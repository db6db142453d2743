"""Detection of workers that hang: their first tokens are far later than was predicted."""

from router.fleet.pools import heartbeat_of
from router.fleet.state import Fleet


def look_for_hangs(fleet: Fleet, now_s: float) -> None:
    """Reports workers whose first tokens are far later than predicted to the outlier detection."""
    outliers, first_tokens, bounds = fleet.outliers, fleet.first_tokens, fleet.outliers.bounds
    if not outliers.enabled or not first_tokens.may_judge():
        return
    for key, load in fleet.loads.items():
        standing = outliers.standing(key)
        if standing is None:
            owes = load.prefills >= bounds.hang_requests
            last_s = outliers.served_s(key)
            owed_s = first_tokens.owed_for_s(key, owes, last_s, now_s)
        else:  # old requests may hang there for ever; only its probes count now
            first_tokens.forget(key)
            owed_s = now_s - min(standing.probes.values(), default=now_s)
        if owed_s <= bounds.hang_s or (source := fleet.view.sources.get(key)) is None:
            continue
        rate = fleet.rates.rate(key, heartbeat_of(source).model)
        predicted_s = max(first_tokens.mean_s, load.prefill_tokens_active / rate)
        if owed_s > bounds.hang_s + bounds.hang_factor * predicted_s:
            outliers.on_overdue(key, now_s)
