"""The Go program that docs/call-it.md links to, built by buf and Go and run as it stands there."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.v1 import Progress, ProgressState, ReportRequest, RouteResponse
from tests.cluster.binaries import go
from tests.interop.binaries import BUF, GEN_GO, GEN_GO_GRPC, GRPC, GRPC_VERSION
from tests.interop.fleet import Router, router
from tests.interop.shell import a_shell
from tests.interop.stage import run
from tests.stage.served import asked
from tests.stage.waiting import until

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "examples" / "go"
LINES_MAX = 100
RETRY_AFTER_S = 2
ROUTE, REPORT = "/kvroute.v1.Router/Route", "/kvroute.v1.Router/Report"


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built as the page says."""
    assert len((PROGRAM / "main.go").read_text(encoding="utf-8").splitlines()) <= LINES_MAX
    folder = tmp_path_factory.mktemp("caller")
    shutil.copytree(PROGRAM, folder, dirs_exist_ok=True)
    for proto in (ROOT / "proto").rglob("*.proto"):
        copy = folder / "kvroute" / proto.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(proto, copy)
    status = folder / "googleapis" / "google" / "rpc" / "status.proto"
    status.parent.mkdir(parents=True)
    shutil.copy(str(files("google.rpc") / "status.proto"), status)
    tools = folder / "bin"
    tools.mkdir()
    for tool in (GEN_GO, GEN_GO_GRPC):
        (tools / tool.name).symlink_to(tool.path)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run([str(BUF.path), "generate"], check=True, cwd=folder, env=env)
    (folder / "go.mod").write_text(f"module caller\n\ngo 1.26.0\n\nrequire {GRPC} {GRPC_VERSION}\n")
    go("build", "-o", "caller", ".", cwd=folder)
    go("vet", ".", cwd=folder)
    return folder / "caller"


def target(serving: Router) -> str:
    return f"localhost:{serving.port}"


def is_chat(output: str) -> bool:
    """Whether it has the chunks of an answer, and nothing else."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in output.splitlines()]
    return len(chunks) > 2 and all("choices" in chunk for chunk in chunks)


async def test_a_chat_is_picked_for_sent_and_reported(caller: Path, plain: Router) -> None:
    before = plain.metric("kvroute_reservations_ended_total", 'ending="finished"')
    code, output = await run(caller, "m", "What does a router know?", target(plain))
    assert (code, is_chat(output)) == (0, True), output
    assert plain.metric("kvroute_reservations_ended_total", 'ending="finished"') == before + 1


@asynccontextmanager
async def full(serving: Router) -> AsyncIterator[asyncio.Event]:
    """The only slot of model `full` is taken until the event is set."""
    free = asyncio.Event()
    async with a_shell("go", target(serving)) as shell:
        taken = await shell.call(ROUTE, asked(4, model="full").SerializeToString())
        reservation = RouteResponse.FromString(taken.answer).reservation_id
        finished = Progress(reservation_id=reservation, state=ProgressState.PROGRESS_STATE_FINISHED)

        async def release() -> None:
            await free.wait()
            await shell.call(REPORT, ReportRequest(progress=[finished]).SerializeToString())

        releasing = asyncio.create_task(release())
        try:
            yield free
        finally:
            free.set()
            await releasing


async def test_it_comes_again_when_the_router_says(
    caller: Path, workers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """RetryInfo."""
    with router(tmp_path, workers, queue={"max_waiting": 0}) as serving:
        async with full(serving) as free:
            running = asyncio.create_task(run(caller, "full", "hello", target(serving)))
            reason = 'reason="ALL_WORKERS_FULL"'
            await until(
                lambda: serving.metric("kvroute_requests_total", reason) > 1, "refused twice"
            )
            free.set()
            code, output = await running
    assert (code, is_chat(output)) == (0, True), output


async def test_it_goes_to_another_router_when_one_stops(
    caller: Path, workers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """It waits in the queue of the first one meanwhile; then the first one is gone."""
    with router(tmp_path / "a", workers) as first, router(tmp_path / "b", workers) as second:
        command = (caller, "full", "hello", target(first), target(second))
        async with full(first):
            running = asyncio.create_task(run(*command))
            await until(lambda: first.metric("kvroute_queue_depth", 'where="here"'), "it waits")
            first.process.send_signal(signal.SIGTERM)
            code, output = await running
            assert (code, is_chat(output)) == (0, True), output
            assert await asyncio.to_thread(first.process.wait) == 0
        code, output = await run(*command)
        assert (code, is_chat(output)) == (0, True), output
        assert second.metric("kvroute_reservations_ended_total", 'ending="finished"') == 2


@asynccontextmanager
async def busy_once(workers: list[dict[str, Any]]) -> AsyncIterator[list[dict[str, Any]]]:
    """Workers of which the one that gets the first chat answers it with Retry-After."""
    busy = 0
    runners = []

    def through(address: str) -> web.Application:
        async def handle(request: web.Request) -> web.Response:
            nonlocal busy
            if request.path == "/v1/chat/completions" and not busy:
                busy += 1
                raise web.HTTPServiceUnavailable(headers={"Retry-After": str(RETRY_AFTER_S)})
            url, body = f"{address}{request.rel_url}", await request.read()
            async with session.request(request.method, url, data=body) as answer:
                headers = {"Content-Type": answer.headers["Content-Type"]}
                content = await answer.read()
                return web.Response(body=content, status=answer.status, headers=headers)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handle)
        return app

    async with aiohttp.ClientSession() as session:
        try:
            changed = []
            for worker in workers:
                runner = web.AppRunner(through(worker["address"]))
                runners.append(runner)
                await runner.setup()
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                port = runner.addresses[0][1]
                changed.append(worker | {"address": f"http://127.0.0.1:{port}"})
            yield changed
            assert busy == 1
        finally:
            for runner in runners:
                await runner.cleanup()


async def test_it_waits_as_an_engine_says_and_takes_another_worker(
    caller: Path, workers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Retry-After."""
    async with busy_once(workers) as changed:
        starting = router(tmp_path, changed)
        serving = await asyncio.to_thread(starting.__enter__)
        try:
            begun_s = time.monotonic()
            code, output = await run(caller, "m", "hello", target(serving))
            assert time.monotonic() - begun_s >= RETRY_AFTER_S
            assert (code, is_chat(output)) == (0, True), output
            ended = "kvroute_reservations_ended_total"
            assert serving.metric(ended, 'ending="failed_worker"') == 1
            assert serving.metric(ended, 'ending="finished"') == 1
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
