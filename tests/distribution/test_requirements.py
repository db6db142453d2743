"""The lists of dependencies: complete, with hashes, without addresses, under known licences."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = ("build", "image", "dev")
LICENCES = re.compile(
    r"Apache|MIT|BSD|PSF|Python Software Foundation|Zlib|CC0|ISC|MPL|Mozilla|HPND|Unlicense",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"\b(?:A|L)?GPL|GNU|SSPL|BUSL", re.IGNORECASE)
UNNAMED = {"fastokens"}
"""Distributions whose metadata names no licence; their repositories have Apache-2.0 or MIT."""


def named(line: str) -> str:
    """The name that a requirement begins with, as PEP 503 normalizes it."""
    match = re.match(r"[\w.-]+", line)
    assert match is not None, line
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def pinned(name: str) -> dict[str, str]:
    """Each requirement with the lines about it."""
    text = (ROOT / ".ci" / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z])", "\n" + text)[1:]
    return {named(entry): entry.rstrip() for entry in entries}


def direct(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {named(line) for line in lines}


@pytest.mark.parametrize("name", LISTS)
def test_each_dependency_has_a_version_and_hashes(name: str) -> None:
    for requirement, entry in pinned(name).items():
        assert re.match(r"[\w.-]+==[\w.!+-]+", entry), requirement
        assert "--hash=sha256:" in entry, requirement


def test_each_dependency_of_the_project_is_listed() -> None:
    assert direct("nats-server", "oidc", "otel", "prompts") <= pinned("image").keys()
    assert direct("nats-server", "oidc", "otel", "prompts", "dev") <= pinned("dev").keys()


def test_what_builds_the_wheel_is_listed() -> None:
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {named(line) for line in tree["build-system"]["requires"]} <= pinned("build").keys()


@pytest.mark.parametrize("name", ["build", "image"])
def test_the_image_has_what_ci_tested(name: str) -> None:
    dev = pinned("dev")
    assert {each: dev[each] for each in pinned(name)} == pinned(name)


def test_image_and_ci_install_by_hashes_alone() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for command in re.findall(r"\bpip .*\b(?:install|wheel)\b.*", dockerfile):
        assert "--require-hashes" in command or "--no-deps" in command, command
    assert "--no-build-isolation" in dockerfile
    assert re.search(r"^export LOCKED=1\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_names_no_host(name: str) -> None:
    text = (ROOT / ".ci" / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert re.findall(r"\w+://|--(?:extra-)?index|--find-links|--trusted-host", text) == []


def licence_of(distribution: metadata.Distribution) -> str:
    about = distribution.metadata
    classifiers = about.get_all("Classifier") or []
    stated = [one for one in classifiers if one.startswith("License ::")]
    return about.get("License-Expression") or "; ".join(stated) or (about.get("License") or "")[:60]


def test_the_licences_of_installed_dependencies_are_known() -> None:
    faults = {}
    for name in pinned("dev"):
        try:
            licence = licence_of(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue  # of another platform or release of Python
        if name not in UNNAMED and (not LICENCES.search(licence) or COPYLEFT.search(licence)):
            faults[name] = licence
    assert faults == {}
