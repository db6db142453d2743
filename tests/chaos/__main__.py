"""Runs a fleet of processes under faults and traffic: python -m tests.chaos --seconds 600

The exit code is 1 when a law was broken. See README.md beside this file.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from tests.chaos.laws import Verdict, judge
from tests.chaos.report import numbers, table
from tests.chaos.run import Times, print_note, run
from tests.chaos.scenarios import GATEWAY_S, SCENARIOS
from tests.chaos.stage import Options


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the whole run")
    parser.add_argument("--seed", type=int, help="of the faults and the traffic; absent: drawn")
    parser.add_argument("--rate", type=float, default=80.0, help="requests a second")
    parser.add_argument("--no-attempts", action="store_true", help="clients try once")
    parser.add_argument("--tls", action="store_true", help="routers with TLS and tokens")
    parser.add_argument(
        "--hostile-every", type=float, default=0.5, help="seconds between two hostile messages"
    )
    parser.add_argument("--gateways", action="store_true", help="clients use routers' gateways")
    parser.add_argument(
        "--leak", type=float, default=0.0, help="MiB a minute that each router leaks on purpose"
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help="written faults, not drawn ones")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--keep", type=Path, help="folder for logs and records, kept")
    asked = parser.parse_args(words)
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    times = parts(asked.seconds)
    options = Options(
        seed=seed,
        rate=asked.rate,
        attempts=not asked.no_attempts,
        tls=asked.tls,
        hostile_every_s=asked.hostile_every,
        leak_mib_a_minute=asked.leak,
    )
    if asked.gateways:
        options = replace(options, gateways=True, first_byte_s=GATEWAY_S)
    faults = None
    flags = ["--no-attempts"] * asked.no_attempts + ["--tls"] * asked.tls
    flags += ["--gateways"] * asked.gateways + [f"--leak {asked.leak:g}"] * bool(asked.leak)
    if asked.hostile_every != parser.get_default("hostile_every"):
        flags.append(f"--hostile-every {asked.hostile_every:g}")
    more = " ".join(flags)
    command = f"make chaos SECONDS={asked.seconds:g} RATE={asked.rate:g} SEED={seed}"
    if asked.scenario is not None:
        scenario = SCENARIOS[asked.scenario]
        options = replace(options, sizes=scenario.sizes, hostile_every_s=None)
        if scenario.gateways:
            options = replace(options, gateways=True, first_byte_s=GATEWAY_S)
        times = Times(warm_up=10.0, mended=scenario.mended_s, waits=False)
        faults = scenario.faults
        more = f"--scenario {asked.scenario} {more}".strip()
        command = f"make chaos RATE={asked.rate:g} SEED={seed}"
    command += f" ARGS='{more}'" * bool(more)
    print_note(command)
    with tempfile.TemporaryDirectory(prefix="kvroute-chaos-") as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            observed = runner.run(run(options, times, folder, print_note, faults))
        (folder / "troubles.json").write_bytes(msgspec.json.encode(observed.troubles))
    if asked.scenario is None:
        verdicts = judge(observed)
    else:
        verdicts = [*SCENARIOS[asked.scenario].judge(observed), *untimed(judge(observed))]
    sys.stdout.write(table(observed, verdicts, command))
    if asked.json is not None:
        told = numbers(observed, verdicts, command)
        asked.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if all(one.holds for one in verdicts) else 1


def untimed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Those that a short run can judge."""
    return [one for one in verdicts if not one.timed]


def parts(seconds: float) -> Times:
    """A minute of warm-up and one of quiet, or a fifth each of a run shorter than five minutes."""
    edge_s = min(60.0, seconds / 5)
    return Times(warm_up=edge_s, faults=seconds - 2 * edge_s, quiet=max(60.0, edge_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
