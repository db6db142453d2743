"""Commands, flags, targets of make and settings that the pages show are those of the program."""

import re
from pathlib import Path

import click
import pytest

from router.cli.main import cli
from router.config.reading import load
from router.config.settings.configurations import ServeConfig
from tests.stage.pages import FENCE, ROOT, pages, text_of

SHOWN = [page for page in pages() if page.name not in ("CHANGELOG.md", "RESULTS.md")]
SECTIONS = ("routing", "decision_log", "workers", "models")


def lines_of_code(page: Path) -> list[str]:
    """The commands of a page's blocks, each as one line without its comment."""
    text = text_of(page)
    fenced = [block for block in FENCE.findall(text) if not block.startswith("```mermaid")]
    indented = [line for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    code = "\n".join([*fenced, *indented]).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in code.splitlines()]


def settings_of(page: Path) -> list[str]:
    """The pieces of configuration in a page's blocks: those with "..." are left out."""
    text = text_of(page)
    yaml_blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^    .*\n)+", FENCE.sub("", text), re.MULTILINE)
    lines: list[str] = []
    for block in indented:
        piece = re.sub(r"^    ", "", block, flags=re.MULTILINE)
        if re.match(rf"({'|'.join(SECTIONS)}):\s*(#.*)?\n", piece):
            lines.append(piece)
        else:
            keys = tuple(f"{section}:" for section in SECTIONS)
            lines += [line for line in piece.splitlines() if line.startswith(keys)]
    return [
        piece
        for piece in (*yaml_blocks, *lines)
        if "..." not in piece and "apiVersion:" not in piece
    ]


@pytest.mark.parametrize("page", SHOWN, ids=str)
def test_every_command_and_its_flags_exist(page: Path) -> None:
    unknown = []
    for line in lines_of_code(page):
        shown = re.search(r"(?:^|[\s/|])kvroute ([a-z][a-z-]*)(.*)", line)
        if shown is None or line.startswith(("helm ", "kubectl ")):
            continue
        command = cli.commands.get(shown[1])
        if command is None:
            unknown.append(shown[1])
            continue
        options = [one for one in command.params if isinstance(one, click.Option)]
        names = {name for one in options for name in (*one.opts, *one.secondary_opts)}
        flags = re.findall(r"(?<=\s)(--?[a-z][a-z-]*)(?=[\s=]|$)", shown[2])
        unknown += [f"{shown[1]} {flag}" for flag in flags if flag not in names]
    assert not unknown


@pytest.mark.parametrize("page", SHOWN, ids=str)
def test_every_target_of_make_exists(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    code = [*lines_of_code(page), *re.findall(r"`([^`\n]+)`", text_of(page))]
    shown = {found[1] for line in code if (found := re.match(r"make ([a-z-]+)", line))}
    assert shown <= set(targets)


@pytest.mark.parametrize("page", SHOWN, ids=str)
def test_every_piece_of_configuration_is_taken(page: Path, tmp_path: Path) -> None:
    for i, piece in enumerate(settings_of(page)):
        file = tmp_path / f"{i}.yaml"
        file.write_text(piece, encoding="utf-8")
        load(ServeConfig, file, {}, {})


def test_pieces_of_configuration_are_seen() -> None:
    assert len(settings_of(Path("docs/choose-a-policy.md"))) > 5
