"""Every command of `kvroute` with its options."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import click

from events.plane.settings import Settings
from router.app.cli.flags import KeyOption, SharedOption
from router.app.main import cli
from tests.docs.reference import configuration
from tests.docs.reference.markdown import code, plain

HEAD = """# Commands

Every command of `kvroute` with its purpose and options, made by `python -m tests.docs.reference`.
`kvroute COMMAND --help` prints more. Brackets hold an option's default and bounds. *Also* names the
options that stand elsewhere, or under [options of several commands](#options-of-several-commands).
"""
OF_SEVERAL = "Options of several commands"
SEVERAL = 3
"""Commands from which on an option in the same words is of several commands."""
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
    """Options that several commands have in the same words, by their headings."""
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


@cache
def of_several() -> frozenset[tuple[str, str]]:
    """Options that several commands have in the same words, beside those of `shared`."""
    seen = Counter(
        record
        for name, command in commands()
        for option, record in _records(name, command)
        if not isinstance(option, SharedOption | KeyOption)
    )
    return frozenset(record for record, count in seen.items() if count >= SEVERAL)


def page() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    together = {**shared(), OF_SEVERAL: sorted(of_several())}
    for heading, options in sorted(together.items()):
        lines += [f"## {heading}", "", *_rows(options), ""]
    return "\n".join([*lines, *(section(name, command) for name, command in commands())])


def section(name: str, command: click.Command) -> str:
    """One command: its arguments, its purpose, the options that are its alone."""
    pieces = command.collect_usage_pieces(_context(name, command))
    arguments = "".join(f" {piece}" for piece in pieces if piece != "[OPTIONS]")
    lines = [f"## {name}", "", f"`kvroute {name}{arguments}`: {_purpose(command)}", ""]
    own: list[tuple[str, str]] = []
    several: list[str] = []
    elsewhere: dict[str, None] = {}
    for option, record in _records(name, command):
        if isinstance(option, KeyOption):
            if _stands_out(option):
                own.append((record[0], f"The key `{option.key.dotted}`."))
            elsewhere[_keys_of(option.config)] = None
        elif isinstance(option, SharedOption) and record in shared().get(option.shared_as, ()):
            elsewhere[_link(option.shared_as)] = None
        elif record in of_several():
            several.append(code(max(option.opts, key=len)))
        else:
            own.append(record)
    if own:
        lines += [*_rows(own), ""]
    if several:
        elsewhere[", ".join(several)] = None
    if elsewhere:
        lines += [f"Also {'; '.join(elsewhere)}.", ""]
    return "\n".join(lines)


def _link(heading: str) -> str:
    return f"[{heading.lower()}](#{_anchor(heading)})"


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _rows(records: Iterable[tuple[str, str]]) -> list[str]:
    return [f"- `{option}`: {plain(' '.join(text.split()))}" for option, text in records]


def _records(
    name: str, command: click.Command
) -> Iterator[tuple[click.Parameter, tuple[str, str]]]:
    """The options that --help lists, with their texts."""
    context = _context(name, command)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and record[1] and "--help" not in record[0]:
            yield parameter, (_short(record[0]), _short(record[1]))


def _short(text: str) -> str:
    """Without click's words for what the brackets show."""
    return text.replace(" RANGE", "").replace("[default: ", "[")


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


def _purpose(command: click.Command) -> str:
    """The first paragraph of the help."""
    first = inspect.cleandoc(command.help or "").split("\f")[0].split("\n\n")[0]
    return plain(" ".join(first.split()))
