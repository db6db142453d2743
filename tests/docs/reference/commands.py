"""Every command of `kvroute` with its options."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import click

from events.plane.settings import Settings
from router.app.cli.flags import KeyOption, SharedOption
from router.app.main import cli
from tests.docs.reference import configuration
from tests.docs.reference.markdown import cell, code, plain, table

HEAD = """# Commands

Every command of `kvroute` with its options. `python -m tests.docs.reference` makes this page from
the code; `kvroute COMMAND --help` prints the same text. An option in brackets has that default; a
range bounds its value.
"""
OF_KEYS = "a flag for each scalar key of [its configuration](reference-configuration.md#{})"
OF_ENGINES = (
    "a flag for each key of [an entry of `workers`](reference-configuration.md#serve-workers)"
)


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


@cache
def shared() -> Mapping[str, Mapping[tuple[str, str], click.Option]]:
    """Tables of options that several commands have in the same words, by their headings."""
    seen: dict[str, list[dict[tuple[str, str], click.Option]]] = {}
    for name, command in commands():
        own: dict[str, dict[tuple[str, str], click.Option]] = {}
        for option, record in _records(name, command):
            if isinstance(option, SharedOption):
                own.setdefault(option.shared_as, {})[record] = option
        for heading, options in own.items():
            seen.setdefault(heading, []).append(options)
    return {
        heading: {
            record: option
            for record, option in tables[0].items()
            if all(record in table for table in tables)
        }
        for heading, tables in seen.items()
        if len(tables) > 1
    }


def page() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for heading, options in sorted(shared().items()):
        lines += [f"## {heading}", "", *_rows(options), ""]
    return "\n".join([*lines, *(section(name, command) for name, command in commands())])


def section(name: str, command: click.Command) -> str:
    """One command: its usage, its help, a table of the options that are its alone."""
    usage = " ".join(command.collect_usage_pieces(_context(name, command)))
    lines = [f"## {name}", "", f"    kvroute {name} {usage}", "", _help(command), ""]
    own: list[tuple[str, str]] = []
    elsewhere: dict[str, None] = {}
    of_keys = [option for option in command.params if isinstance(option, KeyOption)]
    has_selection = any(option.hidden for option in of_keys)
    for option, record in _records(name, command):
        if isinstance(option, KeyOption):
            if has_selection or _stands_out(option):
                own.append(record)
            elsewhere[_keys_of(option.config)] = None
        elif isinstance(option, SharedOption) and record in shared().get(option.shared_as, ()):
            words, anchor = option.shared_as.lower(), option.shared_as.lower().replace(" ", "-")
            elsewhere[f"[{words}](#{anchor})"] = None
        else:
            own.append(record)
    if own:
        lines += [*_rows(own), ""]
    if elsewhere:
        lines += [f"{'And' if own else 'It has'} {', and '.join(elsewhere)}.", ""]
    return "\n".join(lines)


def _rows(records: Iterable[tuple[str, str]]) -> list[str]:
    return table(("option", "meaning"), [(code(option), cell(text)) for option, text in records])


def _records(
    name: str, command: click.Command
) -> Iterator[tuple[click.Parameter, tuple[str, str]]]:
    """The options that --help lists, with their texts."""
    context = _context(name, command)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and record[1] and "--help" not in record[0]:
            yield parameter, record


def _context(name: str, command: click.Command) -> click.Context:
    return click.Context(command, info_name=f"kvroute {name}", help_option_names=["-h", "--help"])


def _stands_out(option: KeyOption) -> bool:
    """Whether its name, or that it is required, is not known by its key."""
    return option.required or option.opts != [option.key.flag]


def _keys_of(config: type[Settings]) -> str:
    for name, its in configuration.PROGRAMS.items():
        if its is config:
            return OF_KEYS.format(name.replace(" ", "-"))
    return OF_ENGINES


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
