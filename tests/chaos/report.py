"""How a run is told: a table for a reader, and JSON with the same numbers. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from tests.chaos.late import late_picks
from tests.chaos.laws import LATE_S, MUTE, Verdict, failures_by_cause, slopes
from tests.chaos.records import Cause, Observed


def numbers(run: Observed, verdicts: Sequence[Verdict], command: str) -> dict[str, Any]:
    """What the JSON file says."""
    return {
        "command": command,
        "laws": [
            {
                "law": one.law,
                "looked": one.looked,
                "broken": one.broken,
                "timed": one.timed,
                "details": one.details,
            }
            for one in verdicts
        ],
        "faults": dict(Counter(one.cause.value for one in run.troubles)),
        "failed_before_first_byte": dict(failures_by_cause(run, begun=False)),
        "failed_after_first_byte": dict(failures_by_cause(run, begun=True)),
        "late_requests_to_mute_workers": dict(_late_at_mute(run)),
        "routers": {
            one.name: {
                "warm": msgspec.to_builtins(one.warm),
                "quiet": msgspec.to_builtins(one.quiet),
            }
            for one in run.routers
        },
        "notes": run.notes,
    }


def table(run: Observed, verdicts: Sequence[Verdict], command: str) -> str:
    """What a terminal shows."""
    lines = ["", f"{'':6}{'broken':>8}{'looked at':>11}  law"]
    for one in verdicts:
        mark = "BROKEN" if one.broken else "ok" if one.looked else "-"
        lines.append(f"{mark:6}{one.broken:8}{one.looked:11}  {one.law}")
        lines += [f"{'':27}- {detail}" for detail in one.details]
    lines += ["", f"{'cause':22}{'times':>7}{'failed before':>15}{'after 1st byte':>16}"]
    times = Counter(one.cause.value for one in run.troubles)
    before, after = failures_by_cause(run, begun=False), failures_by_cause(run, begun=True)
    for name in [*(cause.value for cause in Cause), "none"]:
        if times[name] or before[name] or after[name]:
            lines.append(f"{name:22}{times[name]:7}{before[name]:15}{after[name]:16}")
    late = _late_at_mute(run)
    if late:
        told = ", ".join(f"{name} {count}" for name, count in late.items())
        lines.append(f"requests 0.5 s after the first failure at a mute worker: {told}")
    for router in run.routers:
        for when, memory in (("warm-up", router.warm), ("quiet", router.quiet)):
            lines.append(
                f"{router.name} after the {when}: {memory.resident / 2**20:.0f} MiB resident,"
                f" {memory.malloc / 2**20:.1f} MiB of malloc and {memory.objects} Python objects"
                " in use"
            )
    lines += _resident_by_minute(run)
    lines += ["", *(f"{name}: {number:g}" for name, number in run.notes.items())]
    lines += ["", f"again: {command}", ""]
    return "\n".join(lines)


def _resident_by_minute(run: Observed) -> list[str]:
    """A line a router: the median of each minute's looks, in MiB."""
    minutes: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for one in run.resident:
        minutes[one.name][int(one.at_s // 60)].append(one.bytes)
    grown = {name: [each / 2**20 for each in of] for name, of in slopes(run).items()}
    return [
        f"{name}, MiB resident in each minute: "
        + ", ".join(f"{median(looks) / 2**20:.0f}" for _, looks in sorted(of.items()))
        + (f"; {grown[name][0]:.2f} a minute, error {grown[name][1]:.2f}" if name in grown else "")
        for name, of in sorted(minutes.items())
    ]


def _late_at_mute(run: Observed) -> Counter[str]:
    return Counter(trouble.cause.value for trouble, _, _ in late_picks(run, MUTE, LATE_S))
