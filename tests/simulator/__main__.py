"""Checks the laws of the virtual world on random fleets: python -m tests.simulator --seconds N

Each seed is RUNS_EACH runs. A broken law ends it, with the smallest trace and fleet that Hypothesis
comes to, and with exit code 1.
"""

import argparse
import secrets
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.simulator.worlds import check, fleets, traces

RUNS_EACH = 100


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no seed after so long")
    parser.add_argument("--seed", type=int, help="of the first runs; the next ones count on")
    parser.add_argument("--no-shrink", action="store_true", help="print what broke as it came")
    given_words = parser.parse_args(words)
    number = secrets.randbits(31) if given_words.seed is None else given_words.seed
    end_s = time.monotonic() + given_words.seconds
    runs = 0
    while not runs or time.monotonic() < end_s:
        sys.stderr.write(f"seed {number}\n")
        _play(number, shrinks=not given_words.no_shrink)
        number, runs = number + 1, runs + RUNS_EACH
    sys.stdout.write(f"{runs} runs broke no law\n")
    return 0


def _play(number: int, *, shrinks: bool) -> None:
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    options = settings(
        max_examples=RUNS_EACH,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    seed(number)(options(given(traces(), fleets())(check)))()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
