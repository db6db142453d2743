"""`kvroute simulate --gateway`: OpenAI's and Anthropic's API before stand-in engines.

The whole of kvroute is here: engines and a router with its gateway in this process, their relays in
a child of it, and an embedded NATS server.
"""

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console

from events.plane.settings import EngineSettings
from kvroute.client import KvRouteClient
from router.app.processes.router_process import RouterApp
from router.config.settings.configurations import ServeConfig
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.request_settings import RequestSettings
from router.config.settings.serving_settings import GrpcSettings, LogSettings, MetricsSettings
from simulator.live.run import Engines, engines_table, show_commands, warn_of_strangers
from simulator.live.stand_ins import StandIn

READY_S = 60.0
"""Most seconds until a router and its workers are ready."""
DRAIN_S = 2.0
"""Most seconds that open requests go on after Ctrl-C."""
ROUTER = "127.0.0.1:50051"
_SYSTEM = (
    "You are one of several engines behind a router. The router knows the cache of every engine,"
    " and sends a prompt to the engine that has computed most of it already."
)
"""System message of the printed example, longer than two blocks of 64 one-byte tokens."""


log = logging.getLogger("kvroute")


async def run_with_gateway(
    running: Engines, console: Console, *, host: str, listen: str, grpc_listen: str
) -> int:
    """Runs engines, a router and its gateway until SIGINT or SIGTERM; returns the exit code.

    host: where the engines listen. listen, grpc_listen: host:port of the gateway and of the router;
    port 0: any free port. Raises ConfigError, OSError or zmq.ZMQError for an address that can't be
    bound, TimeoutError if the workers are not ready after READY_S.
    """
    with tempfile.TemporaryDirectory(prefix="kvroute-simulate-") as folder:
        socket = Path(folder) / "router.sock"
        async with running as engines:
            app = RouterApp(gateway_config(engines, listen, grpc_listen, socket))
            serving = asyncio.create_task(app.run())
            ready = asyncio.create_task(_ready(f"unix:{socket}", len(engines)))
            try:
                await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    ready.result()
                    _show(console, engines, app)
                    warn_of_strangers(console, host)
                return await serving
            finally:
                ready.cancel()
                serving.cancel()
                await asyncio.gather(ready, serving, return_exceptions=True)


def gateway_config(
    engines: Sequence[StandIn], listen: str, grpc_listen: str, socket: Path
) -> ServeConfig:
    """The configuration of a router with a gateway, which runs a relay for each engine.

    listen, grpc_listen: as for run_with_gateway. socket: unix socket on which the router also
    takes gRPC calls.
    """
    workers = [engine.relay_settings() for engine in engines]
    # The relays' process logs as this one does.
    level: Literal["info", "error"] = "info" if log.isEnabledFor(logging.INFO) else "error"
    return ServeConfig(
        log=LogSettings(format="plain", level=level),
        grpc=GrpcSettings(listen=grpc_listen, unix_socket=str(socket)),
        metrics=MetricsSettings(listen="127.0.0.1:0"),
        gateway=GatewaySettings(listen=listen, salt="tenant", answer_headers=True),
        requests=RequestSettings(drain_timeout_s=DRAIN_S),
        drain_timeout_s=DRAIN_S,
        workers=msgspec.convert(workers, tuple[EngineSettings, ...]),
    )


async def _ready(target: str, count: int) -> None:
    async with KvRouteClient(target) as client:
        await workers_ready(client, count)


async def workers_ready(client: KvRouteClient, count: int) -> None:
    """Returns once the router may pick `count` workers; raises TimeoutError after READY_S."""
    schedulable: dict[str, bool] = {}
    try:
        async with asyncio.timeout(READY_S):
            await client.wait_ready(2 * READY_S)  # longer, so that the error is the one below
            async for update in client.watch_workers():
                schedulable |= {worker.worker_id: worker.schedulable for worker in update.changed}
                if sum(schedulable.values()) == count:
                    return
    except TimeoutError:
        ready = sum(schedulable.values())
        raise TimeoutError(
            f"{ready} of {count} engines are ready at the router after {READY_S:g} s"
        ) from None


def _show(console: Console, engines: Sequence[StandIn], app: RouterApp) -> None:
    model = engines[0].engine.config.model
    root = f"http://127.0.0.1:{app.listeners.gateway_port}"
    base = f"{root}/v1"
    target = f"127.0.0.1:{app.listeners.grpc_port}"
    flag = "" if target == ROUTER else f" -t {target}"
    console.print(engines_table(engines), crop=False)
    console.print(f"\nOpenAI's API  {base}, model {model}, any key", highlight=False)
    console.print(f"Anthropic's   {root}, the same", highlight=False)
    console.print(f"router        {target}", highlight=False)
    page = f"http://127.0.0.1:{app.listeners.metrics_port}/console/"
    console.print(f"console       {page}", highlight=False)
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "system", "content": "{_SYSTEM}"}},'
        ' {"role": "user", "content": "Hello"}]}'
    )
    lines = [
        f"echo '{body}' > chat.json",
        f"curl -i {base}/chat/completions -H 'Content-Type: application/json' -d @chat.json",
        f"kvroute explain{flag} --chat chat.json    # the overlap of the chat at each engine",
        f"kvroute workers{flag}",
        f"export OPENAI_BASE_URL={base} OPENAI_API_KEY=none    # for programs with openai's client",
    ]
    show_commands(console, "to try, in another shell:", lines)
    console.print(
        "\nSend the same chat twice: X-Kvroute-Worker shows that it goes to the same engine, and"
        " X-Kvroute-Overlap-Tokens how much of it that engine had cached; explain shows both before"
        " it is sent.\nCtrl-C ends all.",
        highlight=False,
        soft_wrap=True,
    )
