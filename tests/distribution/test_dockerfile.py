"""The Dockerfile: its steps in a plain folder, and its entry point until it is asked to stop."""

import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.distribution.dockerfile import Image, Step, context, is_ignored, steps
from tests.distribution.packages import ROOT

PATIENCE_S = 120.0
"""For a busy machine; then the process is killed, and the test fails."""


def everything() -> list[str]:
    """What a checkout has, without what git ignores."""
    listed = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    return subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()


def test_steps_are_joined_and_comments_left_out() -> None:
    text = '# syntax\nFROM a AS b\n# why\nRUN one \\\n    && two\n\nCMD ["serve"]\n'
    assert steps(text) == [
        Step("FROM", "a AS b"),
        Step("RUN", "one && two"),
        Step("CMD", '["serve"]'),
    ]
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        steps("HEALTHCHECK NONE\n")


def test_the_last_pattern_that_matches_decides() -> None:
    patterns = [".ci/*", "!.ci/requirements", "tests", "**/*.so", "**/__pycache__"]
    assert is_ignored(".ci/run", patterns)
    assert not is_ignored(".ci/requirements/image.txt", patterns)
    assert is_ignored("tests/a/b.py", patterns)
    assert not is_ignored("router/tests/b.py", patterns)
    assert is_ignored("router/core/fast_path.so", patterns)
    assert is_ignored("router/__pycache__/a.pyc", patterns)


def test_the_build_gets_sources_and_lists_alone() -> None:
    taken = context(ROOT, [*everything(), "router/core/fast_path.c", "indexer/kernel.so", ".env"])
    assert {name.split("/")[0] for name in taken} >= {".ci", "router", "proto", "pyproject.toml"}
    assert not [name for name in taken if name.endswith((".so", ".c", ".env"))]
    assert not [name for name in taken if name.startswith(("tests/", "helm/", ".git/"))]
    assert ".ci/requirements/image.txt" in taken


@pytest.mark.long
def test_the_steps_make_an_environment_whose_entry_point_serves(tmp_path: Path) -> None:
    """Needs the package index, and minutes of a compiler."""
    image = Image(tmp_path, ROOT, context(ROOT, everything()))
    image.build()
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image.user)
    assert not (tmp_path / "opt/kvroute/bin/pip").exists()
    free = ["--grpc-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    command = [*image.entry, *image.command, *free]
    with subprocess.Popen(
        command, cwd=image.path("."), env=image.env, stderr=subprocess.PIPE, text=True
    ) as process:
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "metrics on 127.0.0.1:0 (port " in line:
                process.send_signal(signal.SIGTERM)
        late.cancel()
    assert process.returncode == 0, "".join(lines)
    assert "stopped" in lines[-1]
