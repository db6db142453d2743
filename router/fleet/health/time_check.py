"""Compares predicted with measured times: to the first token, and between tokens.

The predicted time is that in a pick's answer. The measured time is that from the pick to the report
of PREFILL_DONE, or the mean time between tokens from there to FINISHED. A request without these
reports is not counted. Pure.

Laws:
- entries are at most as many as open reservations;
- each prediction is counted once at most.
"""

from bisect import bisect_left

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0)
"""Upper bounds of buckets: measured / predicted. 0.9 to 1.1 counts as exact."""


class TimeCheck:
    """Predictions of one kind for a router's open reservations, and the counted comparisons."""

    def __init__(self) -> None:
        self.counts = [0] * (len(RATIOS) + 1)
        """Number of compared requests in each bucket of RATIOS, and above the last bound."""
        self.ratios = 0.0
        """Sum of measured / predicted over the compared requests."""
        self.measured_s = 0.0
        """Sum of the measured times, in seconds."""
        self.wrong_s = 0.0
        """Sum of the differences between measured and predicted times, in seconds."""
        self.predicted_s: dict[str, float] = {}
        """Id of an open reservation -> predicted seconds, until its time is measured."""

    def __len__(self) -> int:
        """Number of predictions whose times were not measured yet."""
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
