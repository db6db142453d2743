"""Commands, flags, targets of make and settings that the pages show are those of the program, and
what three pages promise has tests (promises.yaml)."""

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from router.app.main import cli
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


# --- promises of the pages on security, the event plane and the gateway --------------------------

HELD = yaml.safe_load((ROOT / "tests/docs/promises.yaml").read_text(encoding="utf-8"))
EXPLAINS = {
    "docs/nats.md": set(),
    "docs/gateway.md": set(),
    "docs/security.md": {"What kvroute doesn't defend against"},
    "docs/reference-statuses.md": {"Of a router", "Of the gateway and the endpoint picker"},
}
"""Sections that promise nothing, or only numbers of a benchmark."""


def plain(text: str) -> str:
    return " ".join(text.split())


def sections(page: str) -> dict[str, str]:
    """Sections of the second level, by their titles; "": what stands before them."""
    parts = re.split(r"^## (.+)$", text_of(Path(page)), flags=re.MULTILINE)
    return {"": plain(parts[0])} | {
        title: plain(body) for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@cache
def names_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, functions) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("page", EXPLAINS)
def test_each_promise_stands_in_its_page(page: str) -> None:
    whole = " ".join(sections(page).values())
    assert [promise for promise in HELD[page] if plain(promise) not in whole] == []


@pytest.mark.parametrize("page", EXPLAINS)
def test_each_section_has_a_promise_that_a_test_holds(page: str) -> None:
    without = {
        title
        for title, text in sections(page).items()
        if title and not any(plain(promise) in text for promise in HELD[page])
    }
    assert without == EXPLAINS[page]


@pytest.mark.parametrize("page", EXPLAINS)
def test_the_tests_of_each_promise_are_there(page: str) -> None:
    missing = []
    for tests in HELD[page].values():
        assert tests
        for test in tests:
            file, _, name = test.partition("::")
            known = names_of(file)
            if not known or (name != "*" and name not in known):
                missing.append(test)
    assert missing == []
