"""Compares predicted with measured times: to the first token, and between tokens.

Predicted is the time that a pick's answer names. Measured is the time from the pick to the report
of PREFILL_DONE, and the mean time between tokens from there to FINISHED. A request for which these
are not reported says nothing. Pure.

Laws:
- entries are at most as many as open reservations;
- each prediction is counted once at most.
"""

from bisect import bisect_left

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0)
"""Upper bounds of buckets: measured / predicted. 0.9 to 1.1 counts as exact."""


class TimeCheck:
    """The predictions of one router's open reservations, and the counted comparisons."""

    def __init__(self) -> None:
        self.counts = [0] * (len(RATIOS) + 1)
        """Requests by their ratio, one number for each bucket."""
        self.ratios = 0.0
        """Sum of the ratios; measured_s is that of the times, wrong_s that of their differences to
        the predictions, both in seconds."""
        self.measured_s = 0.0
        self.wrong_s = 0.0
        self.predicted_s: dict[str, float] = {}
        """Predicted seconds by reservation, of those that may be measured yet."""

    def __len__(self) -> int:
        """Predictions that may be measured yet."""
        return len(self.predicted_s)

    def on_pick(self, reservation_id: str, predicted_s: float) -> None:
        """Records a pick's predicted time, in seconds, above 0."""
        self.predicted_s[reservation_id] = predicted_s

    def on_done(self, reservation_id: str, measured_s: float) -> None:
        """Compares a prediction with the measured time, when that is reported."""
        predicted_s = self.predicted_s.pop(reservation_id, None)
        if predicted_s is None:
            return
        ratio = measured_s / predicted_s
        self.counts[bisect_left(RATIOS, ratio)] += 1
        self.ratios += ratio
        self.measured_s += measured_s
        self.wrong_s += abs(measured_s - predicted_s)

    def on_end(self, reservation_id: str) -> None:
        """Forgets the prediction of a reservation that ended, measured or not."""
        self.predicted_s.pop(reservation_id, None)
