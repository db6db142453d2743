"""A client that is not grpcio: @grpc/grpc-js, from npm."""

import asyncio
import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from indexer.kernel import NativeIndex
from router.config.settings.queue_settings import QueueSettings
from router.net.keys.certificates import Certificates
from tests.stage.certificates import Authority, written
from tests.stage.served import served

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
SPAN_S = 300.0
FOLDERS = f"{ROOT / 'proto'}:{sysconfig.get_path('purelib')}"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of npm's packages."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no Node.js")
    folder = tmp_path_factory.mktemp("grpc-js")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*command, *PACKAGES], check=True, timeout=SPAN_S)
    shutil.copy(HERE / "client.js", folder)
    return folder


async def seen_by_node(modules: Path, folder: Path | None) -> dict[str, Any]:
    """What client.js prints of a router. folder: for certificates; None: plain text."""
    queue = QueueSettings(max_waiting=100, timeout_s=60.0)
    certificates = None
    more: tuple[str, ...] = ()
    if folder is not None:
        authority = Authority()
        certificates = Certificates(written(folder, authority.issue()))
        (folder / "ca.pem").write_bytes(authority.pem)
        more = (str(folder / "ca.pem"),)
    async with served(queue=queue, certificates=certificates, index=NativeIndex()) as stage:
        stage.fleet.add("a", total_slots=None)
        stage.fleet.add("b", total_slots=1, model="full")
        node = await asyncio.create_subprocess_exec(
            "node",
            "client.js",
            f"localhost:{stage.server.port}",
            FOLDERS,
            *more,
            cwd=modules,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert node.stdin is not None
        assert node.stdout is not None
        try:
            async with asyncio.timeout(SPAN_S):
                assert (await node.stdout.readline()).strip() == b"READY"
                assert stage.server.calls == 0
                await stage.server.drain(0)
                node.stdin.write(b"\n")
                found: dict[str, Any] = json.loads(await node.stdout.readline())
                assert await node.wait() == 0
        finally:
            if node.returncode is None:
                node.kill()
    return found


@pytest.mark.parametrize("tls", [False, True])
async def test_it_is_served(modules: Path, tmp_path: Path, tls: bool) -> None:
    one = await seen_by_node(modules, tmp_path if tls else None)
    assert one["route"] == {"code": 0, "worker": "a"}
    assert one["refused"]["code"] == 5
    assert "grpc-status-details-bin" in one["refused"]["trailers"]
    assert one["late"] == 4
    assert one["cancelled"] == {"code": 1}
    assert one["stream"] == {"code": 0, "results": 1000, "failed": 0}
    assert (one["metadata"], one["metadata_over"], one["large"]) == (0, 8, 8)
    assert (one["gzip"], one["deflate"], one["at_once"]) == (0, 0, 500)
    assert (one["unimplemented"], one["stopped"]) == (12, 14)
