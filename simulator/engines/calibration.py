"""Fits a linear cost model to measured steps of a real engine. Pure.

    measurements = read_measurements(lines)
    calibration = calibrate(measurements)
    calibration.cost, calibration.error_mean      # prices, and their mean error

The fit is least squares over *relative* errors, since steps last from a few milliseconds to seconds
and short steps count as much as long ones. No price is negative, since no work saves time. With
five prices the fit is exact: for each of the 31 sets of nonzero prices, plain least squares yields
the best prices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from simulator.engines.cost_model import LinearCost
from simulator.engines.profile import Linear

_Floats = npt.NDArray[np.float64]

PRICES = ("base_s", "sequence_s", "context_token_s", "prefill_token_s", "pair_s")
"""Names of the prices, in the order of `Measurement.work`."""


class CalibrationError(ValueError):
    """The measurements determine no cost model; the message says what is missing."""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured step of an engine: its amounts of work, and its duration in seconds."""

    seconds: Annotated[float, Meta(gt=0, le=1e6)]
    prefill_tokens: Annotated[int, Meta(ge=0)] = 0
    pairs: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Attention pairs of the prompt tokens: `PrefillChunk.attention_pairs`, summed."""
    sequences: Annotated[int, Meta(ge=0)] = 0
    """Requests in the step: decodes and prompts."""
    context_tokens: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """Tokens that the decoding requests attend to, summed."""

    def work(self) -> tuple[float, ...]:
        """The amounts of work by which the prices are multiplied, in the order of PRICES."""
        return 1.0, self.sequences, self.context_tokens, self.prefill_tokens, self.pairs


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The fitted prices of a step's work, and their errors for the measurements."""

    cost: LinearCost
    relative_errors: _Floats
    """(predicted - measured) / measured, one for each measurement."""
    free: tuple[str, ...]
    """Names of the prices that came out as zero: the measurements show no such cost."""

    @property
    def error_mean(self) -> float:
        """Mean of the absolute relative errors."""
        return float(np.abs(self.relative_errors).mean())

    @property
    def error_max(self) -> float:
        return float(np.abs(self.relative_errors).max())

    def section(self, source: str) -> Linear:
        """The `step` section of a profile. source: what was measured, and where."""
        cost = self.cost
        return Linear(
            source=source,
            base_ms=cost.base_s * 1e3,
            sequence_us=cost.sequence_s * 1e6,
            context_token_ns=cost.context_token_s * 1e9,
            prefill_token_us=cost.prefill_token_s * 1e6,
            pair_ns=cost.pair_s * 1e9,
        )


def calibrate(measurements: Sequence[Measurement]) -> Calibration:
    """The prices that reproduce the measurements with the least relative error, none negative.

    Raises CalibrationError when the measurements leave a price undetermined: too few of them, or
    work that always comes in the same proportion.
    """
    work = np.array([step.work() for step in measurements], dtype=np.float64)
    seconds = np.array([step.seconds for step in measurements], dtype=np.float64)
    if len(measurements) < len(PRICES):
        raise CalibrationError(
            f"{len(PRICES)} prices need at least as many measurements, got {len(measurements)}"
        )
    for i, name in enumerate(PRICES):
        if not work[:, i].any():
            raise CalibrationError(f"no measurement has any of the work whose price is {name}")
    scale = work.max(axis=0)  # amounts differ by ten orders of magnitude: one pair, 1e9 pairs
    relative = work / scale / seconds[:, None]
    if np.linalg.matrix_rank(relative) < len(PRICES):
        raise CalibrationError(
            "the measurements can't separate the prices: vary prompt length, batch and context "
            "independently"
        )
    prices = _non_negative(relative, np.ones(len(seconds))) / scale
    return Calibration(
        cost=LinearCost(*prices.tolist()),
        relative_errors=work @ prices / seconds - 1.0,
        free=tuple(name for name, price in zip(PRICES, prices, strict=True) if price == 0.0),
    )


def read_measurements(lines: Iterable[str]) -> list[Measurement]:
    """Reads measurements: a JSON object a line, with Measurement's keys; skips blank lines.

    Raises CalibrationError, with the line's number.
    """
    decoder = msgspec.json.Decoder(Measurement)
    measurements: list[Measurement] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            measurements.append(decoder.decode(text))
        except msgspec.DecodeError as error:
            raise CalibrationError(f"line {number}: {error}") from error
    return measurements


def _non_negative(matrix: _Floats, wanted: _Floats) -> _Floats:
    """argmin over x >= 0 of |matrix @ x - wanted|. The columns are independent, and few."""
    columns = range(matrix.shape[1])
    best, best_error = np.zeros(matrix.shape[1]), np.inf
    for size in range(1, len(columns) + 1):
        for kept in combinations(columns, size):
            part, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
            if (part < 0).any():
                continue
            error = float(np.square(matrix[:, kept] @ part - wanted).sum())
            if error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[list(kept)] = part
    return best
