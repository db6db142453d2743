"""Environments of their own, in build/bench, for what only benchmarks need."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[2] / "build"
DYNAMO = ("dynamo", "ai-dynamo-runtime==1.6.1", "numpy")
"""NVIDIA Dynamo's router, as its wheel has it."""


class Missing(Exception):
    """What a benchmark compares with, or needs, can't be had here; the message says why."""


def python_of(name: str, *packages: str) -> Path:
    """The interpreter of an environment with these packages, made when it is not there.

    Raises Missing.
    """
    folder = BUILD / "bench" / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    run(sys.executable, "-m", "venv", str(folder))
    run(str(python), "-m", "pip", "install", "--quiet", *packages)
    stamp.write_text(wanted)
    return python


def debian_program(name: str, package: str) -> str:
    """Where a program is; its Debian package is installed when that is possible. Raises Missing."""
    if shutil.which(name) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "--yes", "--quiet", package]
        subprocess.run(command, check=False, capture_output=True)
    found = shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed (Debian's package {package})")
    return found


def dynamo_says(*arguments: str) -> Any:
    """What dynamo_side.py measures, in its own process and environment. Raises Missing."""
    side = Path(__file__).with_name("dynamo_side.py")
    return json.loads(run(str(python_of(*DYNAMO)), str(side), *arguments))


def run(*command: str, said: str = "") -> str:
    """What a command prints. said: its input. Raises Missing when it fails."""
    try:
        ran = subprocess.run(command, check=True, capture_output=True, text=True, input=said)
    except OSError as error:
        raise Missing(str(error)) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [str(error)])[-1]
        raise Missing(f"{' '.join(command[1:4])}: {last}") from error
    return ran.stdout
