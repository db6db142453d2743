"""Two routers with TLS and tokens are restarted one after the other under traffic."""

import asyncio
from pathlib import Path

import grpc

from kvroute.client import KvRouteClient
from kvroute.v1 import Progress, ProgressState
from router.app.processes.router_process import RouterApp
from router.config.settings.configurations import ServeConfig
from router.config.settings.keys_settings import KeysSettings
from router.config.settings.serving_settings import GrpcSettings
from tests.stage.certificates import Authority, written
from tests.stage.keys import identity, write_keys
from tests.stage.loopback import a_stage, all_schedulable, serve_config
from tests.stage.waiting import free_port, until

CALLERS = 8
REQUESTS = 200
"""Between two restarts."""
CALL_S = 60.0


class Traffic:
    """Callers that route and report, one request after the other."""

    def __init__(self, client: KvRouteClient) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._client = client
        self._done = asyncio.Event()
        self._callers = [asyncio.create_task(self._call(number)) for number in range(CALLERS)]

    async def more(self) -> None:
        """Waits for REQUESTS further ones."""
        enough = self.answered + REQUESTS
        await until(lambda: self.answered >= enough or self.failures, "further requests")

    async def end(self) -> None:
        self._done.set()
        await asyncio.gather(*self._callers)

    async def _call(self, number: int) -> None:
        first = 1000 * number
        while not self._done.is_set():
            first += 1
            try:
                pick = await self._client.route(
                    token_ids=list(range(first, first + 64)), timeout_s=CALL_S
                )
                finished = Progress(
                    reservation_id=pick.reservation_id, state=ProgressState.PROGRESS_STATE_FINISHED
                )
                await self._client.report(finished, timeout_s=CALL_S)
            except Exception as error:  # each is a failed call
                self.failures.append(f"{type(error).__name__}: {error}")
            else:
                self.answered += 1


async def started(config: ServeConfig, workers: int) -> RouterApp:
    """A router that picks each worker."""
    app = RouterApp(config)
    await app.start()
    await until(lambda: app.serving, "a router that serves")
    await all_schedulable(app, workers)
    return app


async def test_a_rolling_restart_fails_no_call(tmp_path: Path) -> None:
    authority = Authority()
    tls = written(tmp_path, authority.issue())
    keys = KeysSettings(file=write_keys(tmp_path, identity("client", rights=("route", "report"))))
    ports = [free_port(), free_port()]
    credentials = grpc.ssl_channel_credentials(authority.pem)
    targets = [f"127.0.0.1:{port}" for port in ports]
    async with a_stage(engine_count=2) as stage:
        configs = [
            serve_config(stage.nats.url, grpc=GrpcSettings(listen=target), tls=tls, keys=keys)
            for target in targets
        ]
        apps = [await started(config, 2) for config in configs]
        try:
            async with KvRouteClient(
                targets, credentials=credentials, token="client-token", fallback=False
            ) as client:
                traffic = Traffic(client)
                for place, config in enumerate(configs):
                    await traffic.more()
                    await apps[place].stop()
                    await traffic.more()
                    apps[place] = await started(config, 2)
                await traffic.more()
                await traffic.end()
        finally:
            for app in apps:
                await app.stop()
    print(f"{traffic.answered} requests and reports")  # noqa: T201
    assert traffic.failures == []
    assert traffic.answered >= 5 * REQUESTS
    assert all(app.failed is None for app in apps)
