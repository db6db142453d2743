"""Runs the event plane's simulation for a while: python -m tests.simulation --seconds N

Ends with one line of JSON; the exit code is 1 when a law was broken.
"""

import argparse
import json
import secrets
import sys
import time
import traceback
from collections import Counter

from tests.simulation.world import Broken, World, explain


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--seed", type=int, help="of the first run; the next ones count on")
    parser.add_argument("--runs", type=int, help="stop after so many runs")
    parser.add_argument("--verbose", action="store_true", help="what went wrong, and how it ended")
    asked = parser.parse_args(words)
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    end_s = time.monotonic() + asked.seconds
    runs = diverged = false_live = 0
    counts: Counter[str] = Counter()
    while runs != asked.runs and (time.monotonic() < end_s or (runs == 0 and asked.runs)):
        world = World(seed + runs)
        try:
            world.run()
        except Exception as error:
            if isinstance(error, Broken) and error.law == "false live":
                false_live += 1
            else:
                diverged += 1
            if not isinstance(error, Broken):
                traceback.print_exc()
            sys.stderr.write(explain(seed + runs, error, world.log) + "\n")
        counts += world.counts
        runs += 1
    if asked.verbose:
        for what, count in counts.most_common():
            sys.stderr.write(f"{count:10} {what}\n")
    result = {"runs": runs, "diverged": diverged, "false_live": false_live, "seed": seed}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if diverged or false_live else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
