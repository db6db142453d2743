"""`kvroute replay-log FILE... --policy P`: compares another policy with logged decisions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from router.app.cli.text import add_row, console, styled, table
from router.config.settings.routing_settings import RoutingSettings
from router.decide.policies.configured import configured, that_watches
from router.observe.audit.log_replay import SecondOpinion
from router.observe.audit.logged_decision import LoggedDecision, NoHashes
from router.observe.audit.logged_refusal import LoggedRefusal, decode

WIDTH_MIN = 160
_COLUMNS = ("same", "tied", "other", "failed", "hit ratio", "predicted TTFT", "requests there")


def show_replay(
    files: Sequence[Path], names: Sequence[str], routing: RoutingSettings, as_json: bool
) -> int:
    """Prints each policy's comparison with the logged decisions; returns exit code 1 when a line
    could not be read.

    names: names of the policies. Raises ConfigError for an unknown policy, and ClickException when
    no line could be read, or a policy needs hashes that were not logged.
    """
    opinions = []
    for name in names:
        policies = configured(msgspec.structs.replace(routing, policy=name))
        opinions.append(SecondOpinion(that_watches(routing, policies[name])))
    unread = _Unread()
    for line in _lines(files, unread):
        for opinion in opinions:
            try:
                if isinstance(line, LoggedRefusal):
                    opinion.add_refusal(line)
                else:
                    opinion.add(line)
            except NoHashes as error:
                raise click.ClickException(f"{opinion.policy.name}: {error}") from error
    first = opinions[0]
    if not first.decided_by.total() and not first.refusals.total():
        raise click.ClickException(
            "; ".join(filter(None, ("the files have no decision that can be read", unread.first)))
        )
    if as_json:
        result = {
            "unread_lines": unread.count,
            "policies": [opinion.as_dict() for opinion in opinions],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        _print(opinions)
    if unread.count:
        click.echo(f"kvroute: {unread.count} lines could not be read; {unread.first}", err=True)
    return 1 if unread.count else 0


@dataclass
class _Unread:
    """Number of lines that hold neither a decision nor a refusal, and the error of the first."""

    count: int = 0
    first: str = ""


def _lines(files: Sequence[Path], unread: _Unread) -> Iterator[LoggedDecision | LoggedRefusal]:
    for path in files:
        try:
            with path.open("rb") as file:
                for number, content in enumerate(file, 1):
                    try:
                        yield decode(content)
                    except ValueError as error:
                        unread.count += 1
                        unread.first = unread.first or f"{path}:{number}: {error}"
        except OSError as error:
            raise click.ClickException(f"{path}: {error.strerror}") from error


def _print(opinions: Sequence[SecondOpinion]) -> None:
    screen = console(WIDTH_MIN)
    first = opinions[0]
    made = ", ".join(f"{count} by {name}" for name, count in first.decided_by.most_common())
    screen.print(styled(f"{first.decided_by.total()} decisions: {made}", ""))
    if first.refusals:
        why = ", ".join(f"{count} {reason}" for reason, count in first.refusals.most_common())
        screen.print(styled(f"{first.refusals.total()} refused: {why}", ""))
    made_rows = table("policy", right=_COLUMNS)
    summary = first.as_dict()
    add_row(made_rows, "as picked", "", "", "", "", *_numbers(summary, "picked"))
    for opinion in opinions:
        summary = opinion.as_dict()
        total = max(1, opinion.agreements.total())
        shares = [f"{count / total:.1%}" for count in summary["agreement"].values()]
        add_row(made_rows, opinion.policy.name, *shares, *_numbers(summary, "would_be"))
    screen.print(made_rows)
    for opinion in opinions:
        if opinion.taken:
            screen.print(f"{opinion.policy.name} would have taken {opinion.taken} of the refusals")


def _numbers(summary: dict[str, Any], which: str) -> tuple[str, str, str]:
    return (
        f"{summary['hit_ratio'][which]:.1%}",
        f"{summary['ttft_s'][which] * 1000:.1f} ms",
        f"{summary['active_slots'][which]:.2f}",
    )
