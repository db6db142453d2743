"""The steps of the Dockerfile, carried out in a plain folder, where there is no container engine.

Absolute paths of the image stand under the folder. What differs from a build of the image: the base
image is this machine's Python, the compiler is this machine's (apt-get is not run).
"""

import os
import re
import shlex
import shutil
import subprocess
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

KNOWN = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "LABEL",
    "RUN",
    "USER",
    "WORKDIR",
}
_IN_IMAGE = re.compile(r"(?<![\w.:/}-])/(?=(?:opt|src|tmp|var)\b)")
"""The slash that an absolute path of the image begins with; /dev/null is the machine's."""


class Step(NamedTuple):
    word: str
    rest: str


def steps(text: str) -> list[Step]:
    """The instructions in their order. Raises ValueError for one that is not KNOWN."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines) + "\n")
    parsed = [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]
    if unknown := {step.word for step in parsed} - KNOWN:
        raise ValueError(f"the Dockerfile has instructions that this can't carry out: {unknown}")
    return parsed


def is_ignored(path: str, patterns: list[str]) -> bool:
    """By .dockerignore: the last pattern that matches a path, or a folder above it, decides."""
    ignored = False
    for pattern in patterns:
        escaped = re.escape(pattern.removeprefix("!"))
        regex = escaped.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{regex}(?:/.*)?", path):
            ignored = not pattern.startswith("!")
    return ignored


def context(root: Path, names: list[str]) -> list[str]:
    """Those of the names that the build gets."""
    lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [name for name in names if not is_ignored(name, patterns)]


@dataclass
class Image:
    """What the steps leave in a folder."""

    folder: Path
    source: Path
    """Where the Dockerfile stands."""
    names: list[str]
    """The build's context: paths below `source`."""
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    user: str = ""

    def path(self, inside: str) -> Path:
        return self.folder / (Path(self.workdir) / inside).relative_to("/")

    def inside(self, text: str) -> str:
        """With the image's paths in the folder."""
        return _IN_IMAGE.sub(f"{self.folder}/", text)

    def build(self) -> None:
        """All steps. Raises CalledProcessError for one that fails."""
        base = self.folder / "usr" / "local"
        venv.create(base, with_pip=True)
        system = f"{base / 'bin'}{os.pathsep}{os.environ['PATH']}"
        for step in steps((self.source / "Dockerfile").read_text(encoding="utf-8")):
            if step.word == "FROM":  # a stage begins; the folders of the former one stay
                self.env, self.workdir = {"PATH": system, "HOME": str(self.folder)}, "/"
            elif step.word == "ENV":
                for pair in shlex.split(step.rest):
                    key, _, value = pair.partition("=")
                    self.env[key] = self.inside(value.replace("${PATH}", self.env["PATH"]))
            elif step.word == "WORKDIR":
                self.workdir = step.rest
                self.path(".").mkdir(parents=True, exist_ok=True)
            elif step.word == "COPY":
                self._copy(*step.rest.split())
            elif step.word == "RUN":
                self._run(step.rest)
            elif step.word in ("ENTRYPOINT", "CMD"):
                words = [word.strip().strip('"') for word in step.rest.strip("[]").split(",")]
                if step.word == "ENTRYPOINT":
                    self.entry = words
                else:
                    self.command = words
            elif step.word == "USER":
                self.user = step.rest

    def _copy(self, *words: str) -> None:
        if words[0].startswith("--from="):
            if words[1] != words[2] or not self.path(words[1]).exists():
                raise ValueError(f"COPY {words}: environments stay where they were made")
            return
        source, target = words[0].rstrip("/"), self.path(words[1])
        prefix = "" if source == "." else f"{source}/"
        taken = [name for name in self.names if name.startswith(prefix)]
        if not taken:
            raise FileNotFoundError(f"COPY {source}: .dockerignore leaves nothing of it")
        for name in taken:
            copy = target / name.removeprefix(prefix)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.source / name, copy)

    def _run(self, line: str) -> None:
        line = re.sub(r"--mount=\S+\s+", "", line)
        if line.startswith("apt-get "):
            if shutil.which("gcc") is None:
                raise FileNotFoundError("gcc, which the image installs by apt-get")
            return
        subprocess.run(
            ["/bin/sh", "-ec", self.inside(line)], cwd=self.path("."), env=self.env, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
