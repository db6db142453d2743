"""How a good client fares under each attack: python -m tests.hostile --seconds 4 --rounds 5

Server and good client run on one core, the attacker on another. Prints a table, and each law of
verdict.py that was broken, with the longest turn of the loop and the memory; the exit code is 1
when one was.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from tests.hostile.attacks import ATTACKS
from tests.hostile.stage import staged
from tests.hostile.target import pin
from tests.hostile.verdict import HEAD, Rounds


async def play(name: str, seconds: float, rounds: int, seed: int) -> Rounds:
    """One attack, round after round; without it before each."""
    usual, under, turn_ms = [], [], 0.0
    async with staged(name) as stage:
        first = await stage.calls(2 * seconds)  # connections are open from here on
        if first.failures:
            raise RuntimeError(f"a call failed without an attack: {first.failures[0]}")
        before = await stage.server.look()
        for number in range(rounds):
            usual.append(await stage.calls(seconds))
            await stage.server.look()
            calls, opened = await stage.calls_under(name, seed + number, seconds)
            under.append(calls)
            turn_ms = max(turn_ms, (await stage.server.look()).turn_ms)
        after_mib = await stage.memory_after(before.resident_mib)
    sys.stderr.write(
        f"{name}: {opened}, longest turn {turn_ms:.0f} ms, memory"
        f" {before.resident_mib:.0f} -> {after_mib:.0f} MiB\n"
    )
    return Rounds(name, usual, under, turn_ms, before.resident_mib, after_mib)


async def run(names: Sequence[str], seconds: float, rounds: int, seed: int) -> list[Rounds]:
    return [await play(name, seconds, rounds, seed) for name in names]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="without and with each attack")
    parser.add_argument("--rounds", type=int, default=5, help="of each attack")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--only", choices=sorted(ATTACKS), action="append")
    options = parser.parse_args(words)
    pin(attacker=False)
    names = options.only or list(ATTACKS)
    played = asyncio.run(run(names, options.seconds, options.rounds, options.seed))
    broken = [law for rounds in played for law in rounds.broken()]
    table = [*HEAD, *(line for rounds in played for line in rounds.lines())]
    sys.stdout.write("\n".join([*table, "", *(broken or ["all laws held"])]) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
