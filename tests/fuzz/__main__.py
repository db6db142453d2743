"""`python -m tests.fuzz`: rounds of random bytes for a time. Ends with 1 on a difference."""

import sys
from pathlib import Path
from time import monotonic

import click

from tests.fuzz.fuzzer import Fuzzer


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="How long it runs.")
@click.option("--seed", default=0, show_default=True, help="Of all randomness.")
@click.option("--keep", is_flag=True, help="Adds inputs of new outcomes to the corpus.")
@click.option("--only", multiple=True, help="A reader's name; several times. All, without it.")
@click.option("--differences", type=click.Path(path_type=Path), help="File for what differs.")
def main(
    seconds: float, seed: int, keep: bool, only: tuple[str, ...], differences: Path | None
) -> None:
    """Runs readers of bytes beside their libraries and laws."""
    fuzzer = Fuzzer(seed, only)
    began_s = reported_s = monotonic()
    for name, content in fuzzer.corpus():
        if name in fuzzer.readers:
            fuzzer.run(name, content)
    while (now_s := monotonic()) - began_s < seconds:
        fuzzer.rounds(200)
        if now_s - reported_s > 60:
            reported_s = now_s
            click.echo(f"{now_s - began_s:.0f} s: {fuzzer}")
    click.echo(f"seed {seed}, {monotonic() - began_s:.0f} s: {fuzzer}")
    failures = [fuzzer.shortened(failure) for failure in fuzzer.failures]
    for failure in failures:
        click.echo(f"{failure.reader} {failure.content.hex()}\n    {failure.error}", err=True)
    if differences is not None:
        lines = [f"{one.reader} {one.content.hex()} {one.error}\n" for one in failures]
        differences.write_text("".join(lines), encoding="utf-8")
    if keep:
        fuzzer.keep()
    sys.exit(1 if failures else 0)


main()
