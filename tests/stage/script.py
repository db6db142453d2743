"""Files of commands and what they print, for tests: the one reader of them.

command                  a line that a player plays
----                     what it printed, up to an empty line
# a comment
"""

from collections.abc import Callable, Iterator
from typing import Any

REWRITE = "KVROUTE_REWRITE"
"""Environment variable by which files are written again."""


def words_of(line: str) -> tuple[str, list[str], dict[str, str]]:
    """A command's verb, its names and its options KEY=VALUE."""
    verb, *words = line.split()
    names = [word for word in words if "=" not in word]
    return verb, names, dict(word.split("=", 1) for word in words if "=" in word)


def typed(told: str) -> Any:
    """A flag, a number, or the text itself."""
    if told in ("yes", "no"):
        return told == "yes"
    for convert in (int, float):
        try:
            return convert(told)
        except ValueError:
            continue
    return told


def played(text: str, play: Callable[[str], str], *, silent: str = "") -> Iterator[str]:
    """The file's lines, with what its commands print now.

    play: returns what a command prints. silent: what a command prints of which the file shows
    nothing; any other output of a command without a block in the file gets one.
    """
    lines, number = text.splitlines(), 0
    while number < len(lines):
        line = lines[number]
        number += 1
        yield f"{line}\n"
        if not line or line.startswith("#"):
            continue
        try:
            printed = play(line)
        except Exception as error:
            error.add_note(f"line {number}: {line}")
            raise
        shown = lines[number : number + 1] == ["----"]
        if shown:
            while number < len(lines) and lines[number]:
                number += 1
        if printed != silent or (shown and printed):
            yield f"----\n{printed}\n"
            if lines[number : number + 1] not in ([], [""]):
                yield "\n"  # which ends the output
