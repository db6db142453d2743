"""A server for the programs that judge it, and how a program is run."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT

from router.api.service.server import http2_server
from router.config.settings.serving_settings import GrpcSettings
from router.net.http2.server import Http2Server
from router.net.keys.certificates import Certificates
from tests.interop.service import add_services
from tests.stage.programs import running

SPAN_S = 120.0
"""Of one program, on a machine with other work."""
MESSAGE_BYTES_MAX = 64 << 20


@asynccontextmanager
async def serving(certificates: Certificates | None = None) -> AsyncIterator[Http2Server]:
    """kvroute's server as it is configured by default, with the services of the interop tests."""
    server = http2_server(GrpcSettings(), MESSAGE_BYTES_MAX, certificates)
    add_services(server)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop(0.0)


async def run(
    *command: str | Path, env: Mapping[str, str] | None = None, span_s: float = SPAN_S
) -> tuple[int, str]:
    """A program's exit code, and what it printed on both of its outputs."""
    async with (
        asyncio.timeout(span_s),
        running(*command, env=env, stdout=PIPE, stderr=STDOUT) as process,
    ):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace")
