"""Every command of `kvroute` with its options."""

import inspect
import re
from collections.abc import Iterator

import click

from router.cli.main import cli
from tests.docs.reference.markdown import cell, code, plain, table

HEAD = """# Commands

Every command of `kvroute` with its options. `python -m tests.docs.reference` makes this page from
the code; `kvroute COMMAND --help` prints the same text.
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """The commands by their full names, those inside a group after it."""
    stack = [("", command) for command in reversed(_members(cli))]
    while stack:
        above, command = stack.pop()
        name = f"{above}{command.name}"
        yield name, command
        if isinstance(command, click.Group):
            stack += [(f"{name} ", member) for member in reversed(_members(command))]


def _members(group: click.Group) -> list[click.Command]:
    members = sorted(group.commands.items())
    return [command for _, command in members if not command.hidden]


def page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *(section(name, command) for name, command in commands())])


def section(name: str, command: click.Command) -> str:
    """One command: its usage, its help, a table of its options."""
    context = click.Context(
        command, info_name=f"kvroute {name}", help_option_names=["-h", "--help"]
    )
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {name}", "", f"    kvroute {name} {usage}", "", _help(command), ""]
    records = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context))
        and record[1]
        and "--help" not in record[0]
    ]
    if records:
        cells = [(code(option), cell(text)) for option, text in records]
        lines += [*table(("option", "meaning"), cells), ""]
    return "\n".join(lines)


def _help(command: click.Command) -> str:
    """The help's paragraphs; those that keep their lines (after a \\b) as blocks of text."""
    text = inspect.cleandoc(command.help or "").split("\f")[0]
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("\b"):
            kept = paragraph.removeprefix("\b").strip("\n")
            paragraphs.append(f"```text\n{kept}\n```")
        else:
            paragraphs.append(plain(" ".join(paragraph.split())))
    return "\n\n".join(paragraphs)
