"""A router with every face, and two stand-in engines: python -m tests.hostile.server

The first line on standard output has the ports, as JSON. The process ends when its input does.
"""

import asyncio
import os
import sys

import msgspec
import uvloop

from events.plane.settings import EngineSettings
from kvroute.client import KvRouteClient
from router.cli.run import settle
from router.config.settings.configurations import ServeConfig
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.keys_settings import ProbesSettings
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.serving_settings import (
    GrpcSettings,
    HttpSettings,
    LogSettings,
    MetricsSettings,
)
from router.processes.logs import set_up
from router.processes.router_process import RouterApp
from router.service.grpc_polling import prepare
from simulator.cli.gateway import workers_ready
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.engine import EngineConfig
from simulator.live.run import live_engines
from tests.stage.channel import lines, say

ENGINES = 2
SCHEDULER = SchedulerConfig(block_count=2048, block_size=64)
ANY = "127.0.0.1:0"
HEAD_S = 2.0
"""Shorter than the default, so that slow heads meet their bound in a run of seconds."""


async def run() -> int:
    set_up(LogSettings(level="error"))
    configs = [EngineConfig(f"engine-{i}", SCHEDULER) for i in range(ENGINES)]
    async with live_engines(configs, speed=1000.0, port=0) as engines:
        workers = [engine.relay_settings() for engine in engines]
        app = RouterApp(
            ServeConfig(
                grpc=GrpcSettings(listen=ANY, fast_listen=ANY),
                gateway=GatewaySettings(listen=ANY, drain_timeout_s=1.0),
                epp=PickerSettings(listen=ANY),
                metrics=MetricsSettings(listen=ANY),
                probes=ProbesSettings(listen=ANY),
                http=HttpSettings(head_timeout_s=HEAD_S),
                drain_timeout_s=1.0,
                workers=msgspec.convert(workers, tuple[EngineSettings, ...]),
            )
        )
        await app.start()
        try:
            at = app.listeners
            async with KvRouteClient(f"127.0.0.1:{at.grpc_port}") as client:
                await workers_ready(client, ENGINES)
            say(
                grpc=at.grpc_port,
                fast=at.fast_port,
                gateway=at.gateway_port,
                epp=at.picker_port,
                metrics=at.metrics_port,
                probes=at.probes_port,
            )
            async for _ in lines():
                pass
        finally:
            await app.stop()
    return 0


if __name__ == "__main__":
    prepare(os.environ)
    settle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(run()))
