"""Policies as an operator might write them, to his harm."""

import time
from typing import Any

from router.decide.policies.candidates import Candidates

SLOW_S = 0.07


def slow(rows: Candidates) -> Any:
    """Takes longer than a decision may, and fails at some."""
    time.sleep(SLOW_S)
    if time.time() % 10 < 1:
        raise RuntimeError("no reason")
    return rows.running
