"""What a decision costs, plain and with all that a request may name, here and in another checkout.

    python -m tests.bench.roads [--before FOLDER] [--compiled] [--policies ttft] [--workers 8,64]

From a request's bytes to its answer's, in CPU time, without sockets: roads_side.py, a process in
each checkout, which take turns. Prints medians over the repeats, and writes build/roads.json. No
part of `make bench`.

--compiled: of this checkout, what `make compiled` has made of it, as wheels and images have it.
--before: a checkout of kvroute with its environment in .venv; `x before` is this one's time over
its. `x plain` is a case's time over that of a plain request of this checkout.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.environments import BUILD

TREE = Path(__file__).parents[2]
COMPILED = TREE / "build" / "compiled"
SIDE = Path(__file__).with_name("roads_side.py")
RESULTS = BUILD / "roads.json"
OWN = "roads_side:spread"
POLICIES = ("dynamo-adaptive", "dynamo-blocks", "ttft", OWN)
WORKERS = (8, 64, 1000)
CASES = ("plain", "tenant", "label", "lora", "session", "key", "pair")
DECISIONS = 300


class Side:
    """The process in one checkout."""

    def __init__(self, tree: Path) -> None:
        is_here = tree in (TREE, COMPILED)
        python = sys.executable if is_here else str(tree / ".venv" / "bin" / "python")
        env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(SIDE.parent)))}
        self._process = subprocess.Popen(
            (python, str(SIDE)),
            cwd=tree,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def measure(self, policy: str, workers: int, case: str) -> float:
        """Microseconds a decision, without those of an own policy's function."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = {"policy": policy, "workers": workers, "case": case, "decisions": DECISIONS}
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side ended at {words}")
        told: dict[str, float] = json.loads(line)
        return told["us"] - told["own_us"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def table_of(results: Sequence[dict[str, Any]], before: str) -> Table:
    """before: a name of the other checkout; empty: there is none."""
    table = Table("policy", "workers", "case", "us", title="a decision", box=None)
    for name in ("x plain", *((before, "x before") if before else ())):
        table.add_column(name, justify="right")
    plain: dict[tuple[str, int], float] = {}
    for one in results:
        place = one["policy"], one["workers"]
        plain[place] = one["us"] if one["case"] == "plain" else plain[place]
        cells = [one["policy"], str(one["workers"]), one["case"], f"{one['us']:.0f}"]
        cells.append(f"{one['us'] / plain[place]:.2f}")
        if before:
            cells += [f"{one['before_us']:.0f}", f"{one['us'] / one['before_us']:.2f}"]
        table.add_row(*cells)
    return table


def run(
    policies: Sequence[str],
    workers: Sequence[int],
    before: Path | None,
    repeats: int,
    here: Path = TREE,
) -> list[dict[str, Any]]:
    results = []
    sides = {"us": Side(here)} | ({"before_us": Side(before)} if before else {})
    try:
        for policy in policies:
            for count in workers:
                for case in CASES:
                    times: dict[str, list[float]] = {name: [] for name in sides}
                    for _ in range(repeats):
                        for name, side in sides.items():
                            times[name].append(side.measure(policy, count, case))
                    row = {name: round(median(found), 1) for name, found in times.items()}
                    results.append({"policy": policy, "workers": count, "case": case, **row})
                    RESULTS.parent.mkdir(parents=True, exist_ok=True)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        for side in sides.values():
            side.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.roads")
    parser.add_argument("--before", type=Path, help="a checkout of kvroute")
    parser.add_argument("--compiled", action="store_true", help="what `make compiled` has made")
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: %(default)s")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    workers = [int(count) for count in given.workers.split(",")]
    before = given.before.resolve() if given.before else None
    here = COMPILED if given.compiled else TREE
    results = run(given.policies.split(","), workers, before, given.repeats, here)
    Console(width=120).print(table_of(results, before.name if before else ""))


if __name__ == "__main__":
    main()
