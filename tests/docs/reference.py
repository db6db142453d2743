"""docs/reference-commands.md: every command of `kvroute` with its options, from the code.

python -m tests.docs.reference
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from router.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGE = Path("docs/reference-commands.md")
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
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| `{_cell(option, '`')}` | {_cell(text)} |" for option, text in records]
        lines.append("")
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
            paragraphs.append(_plain(" ".join(paragraph.split())))
    return "\n\n".join(paragraphs)


def _cell(text: str, code: str = "") -> str:
    """A cell of a table: one line, no bare pipe, and no mark-up by accident outside code."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if code else _plain(line)


def _plain(text: str) -> str:
    """Prose whose `<`, `*` and `[` are characters, outside its own code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
