"""Real vLLM and SGLang behind a real kvroute: what was predicted against what was reused.

usage: python -m tests.real_engines [--seed N] [--phases quiet,evictions,...]
Ends with one JSON line on standard output, and one more of each phase that has engines of its own:
the ranks of a group (ranks.py), the overload (overload.py), the chats (chat.py), the chats through
Envoy (envoy.py), and the hand-overs (handover.py), which come last.
Everything else goes to standard error and to build/real-engines/logs.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec

from tests.real_engines.drive import PHASES, Driver
from tests.real_engines.pairs import KINDS
from tests.real_engines.stage import StageBroken, a_stage
from tests.real_engines.verdicts import RULES, Judge, Sample

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "real-engines"
UNEXPLAINED_MAX = 0.01
GROUP, OVERLOAD, CHAT, ENVOY = "ranks", "overload", "chat", "envoy"
"""The phases of modules of the same names, which have engines of their own."""

log = logging.getLogger("real_engines")


async def run(seed: int, phases: list[str]) -> int:
    """The whole run; returns the exit code."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel if task else lambda: None)
    judge = Judge()
    broken = ""
    engines: list[str] = []
    driver: Driver | None = None
    try:
        async with a_stage(BUILD, BUILD / "logs") as stage:
            for engine in stage.engines.values():
                ranks = f"{engine.ranks} ranks" if engine.ranks > 1 else "1 rank"
                version = await engine.version()
                engines.append(f"{engine.name} {version}, {ranks}, blocks of {engine.block_size}")
            driver = Driver(stage, judge, random.Random(seed))
            await driver.run(phases)
    except (Exception, asyncio.CancelledError) as error:
        broken = f"{type(error).__name__}: {error}"
        log.error("broken off: %s", broken, exc_info=not isinstance(error, StageBroken))
    return report(judge, driver, engines, broken)


def report(judge: Judge, driver: Driver | None, engines: list[str], broken: str) -> int:
    """Writes samples, table and the last line; returns the exit code."""
    with (BUILD / "logs" / "samples.jsonl").open("wb") as file:
        for one in judge.samples:
            file.write(msgspec.json.encode(one) + b"\n")
    if driver is not None:
        counters = msgspec.json.format(msgspec.json.encode(driver.counters))
        (BUILD / "logs" / "counters.json").write_bytes(counters)
    log.info("%s", table(judge.table()))
    rules = Counter(one.why for one in judge.samples if one.why)
    for rule, count in rules.items():
        log.info("%d %s: %s", count, rule, RULES[rule])
    for one in (*judge.unexplained(quiet=True), *judge.unexplained(quiet=False)):
        shown = msgspec.to_builtins(one) | {"prompt": f"{len(one.prompt.tokens)} tokens"}
        log.warning("unexplained, see logs/difference-*.json: %s", shown)
    quiet = [one for one in judge.samples if one.quiet]
    unexplained = judge.unexplained(quiet=True)
    if driver is not None and driver.unsettled:
        log.warning("%d requests' facts did not come in time", driver.unsettled)
    line = {
        "engines": engines,
        "requests": len(judge.samples),
        **{verdict: _count(judge.samples, verdict) for verdict in ("exact", "over", "under")},
        "explained": sum(rules.values()),
        "quiet": {
            "requests": len(quiet),
            "exact": _count(quiet, "exact"),
            "unexplained": len(unexplained),
        },
        "recoveries": driver.recoveries if driver is not None else [],
    }
    if broken:
        line["broken"] = broken
    sys.stdout.write(json.dumps(line) + "\n")
    return int(bool(broken) or len(unexplained) > UNEXPLAINED_MAX * len(quiet))


def table(rows: dict[str, Counter[str]]) -> str:
    """The table of the README."""
    lines = ["", "| phase | requests | exact | over | under | why |", "|---|---|---|---|---|---|"]
    for phase, row in rows.items():
        why = ", ".join(f"{count} {name}" for name, count in row.items() if ": " in name)
        numbers = " | ".join(str(row[name]) for name in ("requests", "exact", "over", "under"))
        lines.append(f"| {phase} | {numbers} | {why} |")
    return "\n".join(lines)


def _count(samples: list[Sample], verdict: str) -> int:
    return sum(one.verdict == verdict for one in samples)


def main() -> None:
    """Installs what is needed, then runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of prompts and their order")
    known = (*PHASES, GROUP, OVERLOAD, CHAT, ENVOY, *KINDS)
    parser.add_argument("--phases", default=",".join(known), help="some of %(default)s")
    parser.add_argument("--python", default=sys.executable, help="for the engines' environments")
    given = parser.parse_args()
    wanted = given.phases.split(",")
    if unknown := set(wanted) - set(known):
        parser.error(f"no phases: {', '.join(sorted(unknown))}")
    phases = [phase for phase in wanted if phase in PHASES]
    kinds = [phase for phase in wanted if phase in KINDS]
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    install = [str(Path(__file__).with_name("install.sh")), given.python, str(BUILD)]
    if code := subprocess.run(install, check=False).returncode:
        sys.exit(code)
    code = asyncio.run(run(given.seed, phases)) if phases else 0
    if ENVOY in wanted:
        envoy = [str(ROOT / "tests/envoy/install.sh"), str(BUILD.parent / "envoy"), sys.executable]
        code |= subprocess.run(["sh", *envoy], check=False, stdout=sys.stderr).returncode
    for phase in (GROUP, OVERLOAD, CHAT, ENVOY):
        if phase in wanted:
            module = [sys.executable, "-m", f"tests.real_engines.{phase}"]
            seed = ["--seed", str(given.seed)]
            code |= subprocess.run([*module, *seed], check=False).returncode
    if kinds:
        handover = ["--kinds", ",".join(kinds), "--seed", str(given.seed)]
        handover += ["--failed"] * code
        os.execv(sys.executable, [sys.executable, "-m", "tests.real_engines.handover", *handover])
    sys.exit(code)


if __name__ == "__main__":
    main()
