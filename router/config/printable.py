"""Text from outside, made harmless to a terminal."""


def shown(text: str) -> str:
    """Text whose unprintable characters are written as escapes (`\\x1b`).

    Those are control characters, escape sequences and changes of the writing direction.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
