"""What the tests take of the Python sources, by room: `make coverage`.

    python -m tests.coverage REPORT.json

REPORT.json: of `coverage json`, with branches. Native files are not in it: a line names how many
there are, and `make fuzz` and `make sanitize` are what runs them.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
NATIVE = (".pyx", ".pxd", ".pxi", ".h")


def room_of(path: str) -> str:
    """The folder a file's numbers count for: two levels deep, kvroute's below proto."""
    return "/".join(Path(path).parent.parts[:2])


def rooms(report: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Room -> sums of COUNTS, in order of names. Files outside the tree, such as those of a wheel
    that a test installed, are left out."""
    sums: dict[str, Counter[str]] = {}
    for path, told in report["files"].items():
        if Path(path).is_absolute():
            continue
        counts = {name: told["summary"][name] for name in COUNTS}
        sums.setdefault(room_of(path), Counter()).update(counts)
    return dict(sorted(sums.items()))


def table(report: Mapping[str, Any]) -> str:
    found = rooms(report)
    found["all"] = sum(found.values(), Counter())
    lines = [f"{'room':24} {'lines':>7} {'taken':>6}  {'branches':>8} {'taken':>6}"]
    for room, counts in found.items():
        statements, lines_taken, branches, taken = (counts[name] for name in COUNTS)
        lines.append(
            f"{room:24} {statements:7,} {_share(lines_taken, statements)}"
            f"  {branches:8,} {_share(taken, branches)}"
        )
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:6.1%}" if whole else f"{'':6}"


def main(path: str) -> None:
    sys.stdout.write(table(json.loads(Path(path).read_text(encoding="utf-8"))) + "\n")
    native = [one for end in NATIVE for one in ROOT.glob(f"[!.b]*/**/*{end}")]
    lines = sum(len(one.read_text(encoding="utf-8").splitlines()) for one in native)
    sys.stdout.write(f"native, not in the table: {len(native)} files of {lines:,} lines\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
