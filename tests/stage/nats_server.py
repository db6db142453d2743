"""A real nats-server with a configuration of the test's own, which can be changed while it runs."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from router.cluster.children.nats_server import server_binary
from router.cluster.children.process import end, start
from tests.stage.waiting import until


class NatsServer:
    """A server process and the file it was started with."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self.pid = 0
        self._folder = folder

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def write(self, config: str) -> None:
        """What the server is to run with; `reload` makes a running one take it up."""
        (self._folder / "nats.conf").write_text(config)

    async def reload(self) -> None:
        """Returns when the server has read its configuration again."""
        before = self.log().count("Reloaded server configuration")
        os.kill(self.pid, signal.SIGHUP)
        await until(
            lambda: self.log().count("Reloaded server configuration") > before, "a reloaded server"
        )

    def read_url(self) -> str:
        for file in self._folder.glob("*.ports"):
            try:
                self.url = msgspec.json.decode(file.read_bytes())["nats"][0]
            except (msgspec.DecodeError, KeyError, IndexError):
                continue  # still being written
        return self.url


@asynccontextmanager
async def nats_server(folder: Path, config: str) -> AsyncIterator[NatsServer]:
    """Runs a server on a free loopback port; folder: an empty one, for its files."""
    server = NatsServer(folder)
    server.write(config)
    command = [server_binary(), "--addr", "127.0.0.1", "--port", "-1"]
    with (folder / "log").open("wb") as output:
        process = await start(
            [*command, "--ports_file_dir", str(folder), "--config", str(folder / "nats.conf")],
            output,
        )
    server.pid = process.pid
    try:
        await until(server.read_url, "nats-server to listen")
        yield server
    finally:
        await end(process)
