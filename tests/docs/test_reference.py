"""docs/reference-commands.md is what the code makes of the commands."""

from tests.docs.reference import PAGE, commands, page
from tests.stage.pages import text_of


def _words(text: str) -> list[str]:
    return text.split()


def test_the_page_of_commands_is_fresh() -> None:
    """After a change of an option: python -m tests.docs.reference."""
    assert _words(text_of(PAGE)) == _words(page())


def test_each_command_has_a_section_and_each_option_a_row() -> None:
    made = page()
    for name, command in commands():
        section = made.split(f"\n## {name}\n")[1].split("\n## ")[0]
        options = [option for p in command.params for option in p.opts if option.startswith("--")]
        assert [option for option in options if option not in section] == [], name
