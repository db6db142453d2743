"""What `make packages` does to sdists, and which wheels cibuildwheel is configured for."""

import io
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.distribution.packages import (
    FILES,
    FOLDERS,
    IDENTIFIERS,
    digests,
    epoch,
    normalize,
    sources,
)
from tests.distribution.project import ROOT, address, into_distribution

AT_S = 1_700_000_000


def sdist(path: Path, names: list[str], mtime: int, owner: str) -> Path:
    """As setuptools writes one: members in the order of the disk, with their times and owners."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.size = mtime, owner, len(name)
            member.mode = 0o775 if name.endswith(".sh") else 0o664
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def test_two_sdists_of_the_same_files_become_equal(tmp_path: Path) -> None:
    names = ["k/b.py", "k/a.sh", "k/PKG-INFO"]
    (one, other) = (tmp_path / "one", tmp_path / "other")
    one.mkdir()
    other.mkdir()
    sdist(one / "k.tar.gz", names, 1, "ann")
    sdist(other / "k.tar.gz", names[::-1], 2, "bob")
    assert digests(one) != digests(other)
    for folder in (one, other):
        normalize(folder / "k.tar.gz", AT_S)
    assert digests(one) == digests(other)
    with tarfile.open(one / "k.tar.gz") as archive:
        assert archive.getnames() == sorted(names)
        assert {member.mtime for member in archive} == {AT_S}
        assert {member.uname for member in archive} == {""}
        assert archive.getmember("k/a.sh").mode == 0o755
        assert archive.getmember("k/b.py").mode == 0o644
        file = archive.extractfile("k/b.py")
        assert file is not None
        assert file.read() == b"k/b.py"


def test_the_time_is_that_of_source_date_epoch_or_of_the_newest_commit() -> None:
    assert epoch({"SOURCE_DATE_EPOCH": "86400"}) == 86400
    with pytest.raises(ValueError, match="invalid literal"):
        epoch({"SOURCE_DATE_EPOCH": "yesterday"})


def test_packages_are_built_from_sources_alone() -> None:
    paths = [Path(name) for name in sources()]
    assert {path.parts[0] for path in paths} == {*FILES, *FOLDERS}
    assert {"indexer/kernel.pyx", "proto/pyproject.toml"} <= {str(path) for path in paths}
    assert not [path for path in paths if path.suffix in (".so", ".c", ".pyc")]


def test_the_project_s_address_stands_in_one_place() -> None:
    place = address().removeprefix("https://")
    listed = subprocess.run(
        ("git", "-C", ROOT, "grep", "--fixed-strings", "--files-with-matches", place), check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert listed.stdout.splitlines() == ["pyproject.toml"]
    text = (ROOT / "proto" / "pyproject.toml").read_text(encoding="utf-8")
    client = tomllib.loads(into_distribution(text))["project"]
    router = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for key in ("authors", "urls"):
        assert client[key] == router[key]


def test_wheels_are_configured_for_each_python_that_the_router_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    configured = project["tool"]["cibuildwheel"]
    pythons = {pattern.removesuffix("-*") for pattern in configured["build"]}
    assert pythons == {identifier.split("-")[0] for identifier in IDENTIFIERS}
    (oldest,) = (version.strip(">=") for version in [project["project"]["requires-python"]])
    assert f"cp{oldest.replace('.', '')}" in pythons
