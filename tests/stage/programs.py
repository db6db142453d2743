"""Programs that a test runs, in processes of their own."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import IO, NamedTuple

KVROUTE = (sys.executable, "-m", "router.app.main")
"""The command line."""


class Ran(NamedTuple):
    """What a program left behind."""

    code: int
    out: str
    err: str


@asynccontextmanager
async def running(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program. What still runs at the end, of it and of what it started, is killed. env: beside
    this process's."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def ran(
    *command: str | Path, env: Mapping[str, str] | None = None, span_s: float | None = None
) -> Ran:
    """Runs a program to its end. Raises TimeoutError if it takes longer than span_s."""
    async with (
        asyncio.timeout(span_s),
        running(*command, env=env, stdout=PIPE, stderr=PIPE) as process,
    ):
        out, err = await process.communicate()
    return Ran(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))


async def kvroute(*words: str, env: Mapping[str, str] | None = None) -> Ran:
    """Runs a command of kvroute to its end."""
    return await ran(*KVROUTE, *words, env=env)
