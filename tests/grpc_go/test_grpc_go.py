"""A client of grpc-go with its windows as they are by default is served.

It pings between answers to measure its path, which no client of another language does.
"""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from indexer.kernel import NativeIndex
from kvroute.v1 import RouteBatch, RouteItem
from tests.stage.served import asked, served

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
GRPC = "google.golang.org/grpc@v1.85.0"
SPAN_S = 300.0
BATCHES = 10_000


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no Go")
    folder = tmp_path_factory.mktemp("grpc-go")
    shutil.copy(HERE / "client.go", folder)
    for command in (["mod", "init", "client"], ["get", GRPC], ["build", "-o", "client", "."]):
        made = subprocess.run(
            [go, *command], check=False, timeout=SPAN_S, cwd=folder, capture_output=True, text=True
        )
        if made.returncode and command[0] == "get":
            pytest.skip(f"grpc-go can't be fetched: {made.stderr[-200:]}")
        assert made.returncode == 0, made.stderr
    return folder / "client"


async def test_answers_at_any_rate_do_not_end_its_connection(client: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch"
    batch.write_bytes(RouteBatch(items=[RouteItem(request=asked(4))]).SerializeToString())
    async with served(index=NativeIndex()) as stage:
        stage.fleet.add("a", total_slots=None)
        for _ in range(5):
            process = await asyncio.create_subprocess_exec(
                *(str(client), f"127.0.0.1:{stage.server.port}", str(batch), str(BATCHES)),
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            try:
                async with asyncio.timeout(SPAN_S):
                    said = (await process.stdout.read()).decode().splitlines()
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
            assert said == [f"{BATCHES} OK ", f"{BATCHES}"]
