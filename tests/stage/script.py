"""Files of commands and what they print, for tests: the one reader of them.

command                  a line that a player plays
----                     what it printed, up to an empty line
# a comment
"""

from collections.abc import Callable, Iterator


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
