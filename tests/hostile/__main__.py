"""How a good client fares under each attack: python -m tests.hostile --seconds 10

Prints, for each attack and kind of call, the 99th percentile without and with it, and their ratio.
Attacker, server and good client share the machine, so that a ratio is also about its cores. The
exit code is 1 when a call of the good client failed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from tests.hostile.attacks import ATTACKS
from tests.hostile.good import Calls, table
from tests.hostile.stage import a_server, calls_for, under_attack


async def run(names: Sequence[str], seconds: float, seed: int) -> list[tuple[str, Calls, Calls]]:
    rows = []
    async with a_server() as (ports, good):
        await calls_for(good, 1.0)  # connections are open from here on
        for name in names:
            usual = await calls_for(good, seconds)
            under, opened = await under_attack(ports, good, name, seed, seconds)
            sys.stderr.write(f"{name}: {opened} {under.failures[:3]}\n")
            rows.append((name, usual, under))
    return rows


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="without and with each attack")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--only", choices=sorted(ATTACKS), action="append")
    options = parser.parse_args(words)
    rows = asyncio.run(run(options.only or list(ATTACKS), options.seconds, options.seed))
    sys.stdout.write(table(rows) + "\n")
    return int(any(under.failures for _, _, under in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
