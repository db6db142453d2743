"""The command `kvroute policies`: lists policies and presets."""

import click
import msgspec


@click.command()
@click.option(
    "--presets",
    "as_presets",
    is_flag=True,
    help="List the presets instead: the settings of each, and the traces that it was chosen on.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON list with an object for each policy or preset.",
)
def policies(as_presets: bool, as_json: bool) -> None:
    """List the policies with their formulas.

    Their numbers are set in the file, under routing.parameters: {POLICY: {NAME: NUMBER}}. A policy
    of your own is a Python function, named module:function in routing.policy. A preset, named in
    routing.preset, is a set of such settings.
    """
    from router.decide.policies import POLICIES

    if as_presets:
        _show_presets(as_json)
        return
    if as_json:
        rows = [
            {
                "name": policy.name,
                "summary": policy.summary,
                "formula": policy.formula,
                "parameters": dict(policy.parameters),
                "about": policy.described(),
            }
            for policy in POLICIES.values()
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for policy in POLICIES.values():
        click.echo(f"{policy.name}\n    {policy.summary}\n    cost = {policy.formula}")
        about = policy.described()
        for name, value in policy.parameters.items():
            click.echo(f"      {name} = {value:g}    ({about[name]})")


def _show_presets(as_json: bool) -> None:
    from dataclasses import asdict

    from router.config.settings.presets import PRESETS, lines

    if as_json:
        rows = [{"name": name, **asdict(preset)} for name, preset in PRESETS.items()]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for name, preset in PRESETS.items():
        click.echo(f"{name}\n    {preset.summary}")
        for line in lines(preset.sets):
            click.echo(f"      {line}")
        click.echo(f"    chosen on: {preset.chosen_on}")
